"""The count of a server's memory."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from shoal_proto.errors import Overloaded
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import SUM_EACH_S, Memory

LIMIT_BYTES = 100
WHAT = "more rows"


@dataclass
class Server:
    """A server with one shard, and the time."""

    shard_bytes: int = 0
    now_s: float = 0.0
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        catalog = SimpleNamespace(shards=self._shards)
        self.memory = Memory(LIMIT_BYTES, catalog, Budget(1), lambda: self.now_s)  # type: ignore[arg-type]

    def _shards(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(state=SimpleNamespace(held_bytes=self.shard_bytes))]


def test_a_sum_in_the_midst_of_a_push_does_not_release_what_its_shard_will_take() -> None:
    server = Server()
    memory = server.memory
    with memory.growth(WHAT) as reserve:
        reserve(60)
        server.now_s += SUM_EACH_S
        memory.refresh()
        with pytest.raises(Overloaded, match=WHAT), memory.growth(WHAT) as second:
            second(60)
        server.shard_bytes = 60
    assert memory.held_bytes == 60
    server.now_s += SUM_EACH_S
    memory.refresh()
    assert memory.held_bytes == 60


def test_a_refused_push_takes_no_memory() -> None:
    memory = Server().memory
    with pytest.raises(Overloaded), memory.growth(WHAT) as reserve:
        reserve(LIMIT_BYTES + 1)
    assert memory.held_bytes == 0
