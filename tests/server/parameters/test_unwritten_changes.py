"""Work in the background that fails in a way that is not foreseen: nothing stays half-done."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from shoal_proto.errors import AccessDenied
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.shards.assignments import Holder, ShardAssignment
from shoal_server.parameters.cluster.assignment_table import AssignmentTable
from shoal_server.parameters.journal import shard_journal
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.replication.handover import ShardHandover
from shoal_server.parameters.shard.dense import is_dense, new_dense_shard
from shoal_server.parameters.shard.image import Image
from shoal_server.parameters.shard.replica import Role, ShardReplica

ME, OTHER = Holder("ps-0", "one"), Holder("ps-1", "one")
LIMIT_S = 10.0


def new_held() -> ShardReplica:
    spec = Shard(
        shard_id=0, epoch=1, dtype="float32", blocks=[Block(parameter="p", num_elements=2)]
    )
    sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
    return ShardReplica("job", new_dense_shard(spec, sgd, bytearray(8)), Role.PRIMARY, 1)


class LockedRecord:
    """A record that names a successor, and that this server may not write."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    def assignment(self, job: str, shard_id: int) -> ShardAssignment:
        return ShardAssignment(shard_id=0, epoch=1, primary=ME, backups=(OTHER,), successor=OTHER)

    async def change(
        self,
        job: str,
        shard_ids: Collection[int],
        change: Callable[[ShardAssignment], ShardAssignment],
    ) -> bool:
        self.asked.set()
        raise AccessDenied("etcd does not let this server write")


async def test_who_cannot_hand_over_leads_on() -> None:
    """Pushes of its epoch are taken again: nobody else takes them."""
    record, replica = LockedRecord(), new_held()
    handing_over = ShardHandover(ME, cast(AssignmentTable, record))
    handing_over.begin(replica)
    async with asyncio.timeout(LIMIT_S):
        await record.asked.wait()
    await handing_over.close()
    assert not replica.is_handing_over
    assert is_dense(replica.state)
    assert replica.state.spec.epoch == 1


class FullJournal:
    """A journal in which one shard's old records always take too much."""

    def __init__(self) -> None:
        self.images: list[Image] = []
        self.put = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def overdue(self) -> list[tuple[str, int]]:
        return [("job", 0)]

    def put_image(self, job: str, epoch: int, image: Image) -> None:
        self.images.append(image)
        if len(self.images) > 1:
            self._loop.call_soon_threadsafe(self.put.set)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), OSError(28, "no space")])
async def test_a_journal_is_shortened_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whatever it was that failed: the next look is made all the same."""
    monkeypatch.setattr(shard_journal, "LOOK_EACH_S", 0.01)
    journal, replica = FullJournal(), new_held()
    errors = iter([None, error])

    async def take(_: ShardReplica) -> Image:
        if (failure := next(errors, None)) is not None:
            raise failure
        return replica.state.image()

    async def put_on_disk(job: str, shard_ids: Any) -> None:
        """The record is of no matter here."""

    with ThreadPoolExecutor(1) as pool:
        async with ShardJournal(cast(Journal, journal), pool, take, put_on_disk) as kept:
            kept.lead(replica)
            async with asyncio.timeout(LIMIT_S):
                await journal.put.wait()
    assert next(errors, None) is None
