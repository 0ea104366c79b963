"""The comparison of primaries with their backups continues while the server runs."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import config

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.parameters.comparison.digest import PieceDigest
from shoal_server.parameters.process import running
from shoal_server.parameters.replication import comparing
from shoal_server.parameters.replication.comparing import Comparing
from shoal_server.parameters.replication.outgoing_links import OutgoingLinks
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.serving import tasks

T = TypeVar("T")

LIMIT_S = 30.0
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])


class FirstFails(OutgoingLinks):
    """Links over which no digest of shard 0 can be sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.has_sent = asyncio.Event()

    def compare(self, replica: ShardReplica, digest: PieceDigest) -> None:
        if replica.shard_id == 0:
            raise KeyError("a piece")
        self.sent.append(replica.shard_id)
        self.has_sent.set()


async def run_at_once(num_bytes: int, work: Callable[[], T]) -> T:
    return work()


async def test_copies_are_compared_again_after_an_error_of_any_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_begun, goes_on = 0, asyncio.Event()

    async def fail_once(comparing: Comparing) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            raise KeyError("a piece")
        goes_on.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(Comparing, "run_for_ever", fail_once)
    async with running(config("ps-0"), MemoryStore()), asyncio.timeout(LIMIT_S):
        await goes_on.wait()


async def test_a_shard_whose_comparison_fails_does_not_keep_the_next_from_being_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "COMPARE_EACH_S", 0.0)
    catalog, links = Catalog(MemoryStore(), Holder("ps-0", "one")), FirstFails()
    for shard_id in range(2):
        blocks = [Block(parameter="w", num_elements=4)]
        spec = Shard(shard_id=shard_id, epoch=1, dtype="float32", blocks=blocks)
        state = new_dense_shard(spec, SGD, bytearray(16))
        replica = ShardReplica("job", state, ReplicaRole.PRIMARY, 1)
        replica.is_followed = True
        assert catalog.add(replica)
    async with asyncio.timeout(LIMIT_S):
        await tasks.wait_first(
            Comparing(catalog, links, run_at_once).run_for_ever(), links.has_sent.wait()
        )
    assert links.sent == [1]
