"""The segments in a server's memory, as publishers send them."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import Unavailable
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_server.core.processes import Holder
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.weights import holdings as module
from shoal_server.parameters.weights.holdings import WeightHoldings
from shoal_server.parameters.weights.store import SegmentOrigin


class SlowPublisher:
    """A publisher whose first chunk never arrives whole."""

    is_local = False

    async def receive_descriptor(self) -> int:
        raise NotImplementedError

    async def receive_chunks(self, writer: SegmentWriter) -> AsyncGenerator[memoryview, None]:
        await asyncio.Event().wait()
        yield writer.buffer

    def end(self) -> None:
        pass

    async def send_descriptor(self, segment: Segment) -> None:
        raise NotImplementedError

    async def send_chunk(self, index: int, segment: Segment) -> None:
        raise NotImplementedError


async def test_a_publisher_that_is_too_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not claim that the publisher has stopped: the server sees whole chunks only.
    It states the size of a chunk and the time limit. The memory is freed."""
    monkeypatch.setattr(module, "STALLED_S", 0.01)
    memory = Memory(1000, Catalog(MemoryStore(), Holder("ps-0", "one")), Budget(1000))
    origin = SegmentOrigin(epoch=1, publication=1, rank=0)
    with ThreadPoolExecutor(1) as threads:
        holdings = WeightHoldings(memory, threads, cast("Any", None))
        with pytest.raises(Unavailable, match="sends too slowly, or has stopped") as raised:
            await holdings.receive("job/policy", b"d" * 16, 1000, origin, SlowPublisher())
        assert "0.01 s" in raised.value.seen and "8 MiB" in raised.value.expected
        await holdings.make("job/policy", 1000, origin, lambda buffer: None)
        holdings.close()
