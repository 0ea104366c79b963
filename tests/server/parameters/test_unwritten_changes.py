"""Background work of servers that fails: the core is notified, or the work is repeated."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import config
from support.processes.served_process import awaited

from shoal_proto.errors import AccessDenied
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import (
    LoadJournal,
    RefreshShardRecord,
    WriteShardRecord,
)
from shoal_server.core.replication.protocol.events import (
    JournalShardMissing,
    ShardRecordNotWritten,
    ShardRecordRefreshed,
    ShardRecordWritten,
)
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.replication_core import ReplicationCore
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import RangeResult
from shoal_server.etcd.records import assignments
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.journal import shard_journal
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.process import running
from shoal_server.parameters.replication import journal_recovery, record_writer
from shoal_server.parameters.replication.acknowledgements import Acknowledgements
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.parameters.replication.incoming_images import IncomingImages
from shoal_server.parameters.replication.outgoing_links import OutgoingLinks
from shoal_server.parameters.replication.record_writer import RecordWriter
from shoal_server.parameters.replication.shard_roles import ShardRoles
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.tables.restore import restore
from shoal_server.serving import tasks

ME = Holder("ps-0", "one")
LIMIT_S = 10.0


def new_held() -> ShardReplica:
    spec = Shard(
        shard_id=0, epoch=1, dtype="float32", blocks=[Block(parameter="p", num_elements=2)]
    )
    sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
    return ShardReplica("job", new_dense_shard(spec, sgd, bytearray(8)), ReplicaRole.PRIMARY, 1)


class LockedRecord:
    """Assignments that this server may not write."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def change_until_written(
        self,
        job: str,
        shard_ids: Collection[int],
        change: Callable[[ShardAssignment], ShardAssignment],
    ) -> bool:
        self.called.set()
        raise AccessDenied("etcd does not let this server write")


async def test_a_refused_write_of_a_record_is_reported_and_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The core is notified of the failure, and a little later that it may decide again."""
    monkeypatch.setattr(record_writer, "AGAIN_S", 0.01)
    driver, record = CoreDriver(ReplicationCore(ME, ReplicationLimits())), LockedRecord()
    messages: list[object] = []
    again = asyncio.Event()

    def submit(event: object) -> None:
        messages.append(event)
        if isinstance(event, ShardRecordWritten):
            again.set()

    monkeypatch.setattr(driver, "submit_event", submit)
    writer = RecordWriter(driver, cast(AssignmentMirror, record))
    writer.write_shard_record(WriteShardRecord(("job", 0)))
    async with asyncio.timeout(LIMIT_S):
        await again.wait()
    await writer.close()
    assert messages == [ShardRecordNotWritten(("job", 0)), ShardRecordWritten(("job", 0))]


class CountedRecord:
    """Assignments, with the shards whose records were read again."""

    def __init__(self) -> None:
        self.read: list[tuple[str, list[int]]] = []

    async def refresh(self, job: str, shard_ids: Collection[int]) -> None:
        self.read.append((job, list(shard_ids)))


async def test_only_the_record_of_the_named_shard_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job may have thousands, and a message about each of its shards may be waiting."""
    driver, record = CoreDriver(ReplicationCore(ME, ReplicationLimits())), CountedRecord()
    messages: asyncio.Queue[object] = asyncio.Queue()
    monkeypatch.setattr(driver, "submit_event", messages.put_nowait)
    writer = RecordWriter(driver, cast(AssignmentMirror, record))
    writer.refresh_shard_record(RefreshShardRecord(("job", 3)))
    async with asyncio.timeout(LIMIT_S):
        assert await messages.get() == ShardRecordRefreshed(("job", 3))
    await writer.close()
    assert record.read == [("job", [3])]


class LockedStore(MemoryStore):
    """Store that may refuse to list the servers."""

    def __init__(self) -> None:
        super().__init__()
        self.is_locked = False
        self.refused = asyncio.Event()

    async def range(self, prefix: str) -> RangeResult:
        if self.is_locked and prefix == keys.SERVERS:
            self.refused.set()
            raise AccessDenied("etcd does not let this server read")
        return await super().range(prefix)


async def test_records_are_corrected_once_etcd_permits_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record names the disk of a server that has no journal."""
    monkeypatch.setattr(journal_recovery, "LOOK_LATER_EACH_S", 0.01)
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.01)
    store = LockedStore()
    async with running(config("ps-0"), store) as server, asyncio.timeout(LIMIT_S):
        store.is_locked = True
        shard = ShardAssignment(shard_id=0, epoch=1, primary=Holder("ps-1", "one"), on_disk="ps-0")
        await assignments.place(
            store, JobAssignments(job="job", copies=1, shards=(shard,), placement_id="run")
        )
        await store.refused.wait()
        store.is_locked = False

        def is_corrected() -> bool:
            current = server.replicas.assignment("job", 0)
            return current is not None and not current.on_disk

        await asyncio.to_thread(awaited, is_corrected, LIMIT_S, "the record is corrected")


async def test_a_shard_that_cannot_be_loaded_from_the_journal_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has no journal."""
    driver = CoreDriver(ReplicationCore(ME, ReplicationLimits()))
    messages: asyncio.Queue[object] = asyncio.Queue()
    monkeypatch.setattr(driver, "submit_event", messages.put_nowait)
    roles = ShardRoles(
        driver,
        catalog=cast(Catalog, None),
        images=cast(IncomingImages, None),
        acknowledgements=cast(Acknowledgements, None),
        links=cast(OutgoingLinks, None),
    )
    roles.load_journal(LoadJournal(("job", 0), 3))
    async with asyncio.timeout(LIMIT_S):
        assert await messages.get() == JournalShardMissing(("job", 0), 3)
    await roles.close()


class FullJournal:
    """A journal in which one shard's records always take too much space."""

    def __init__(self) -> None:
        self.images: list[ShardImage] = []
        self.put = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.failure: None = None

    def check_capacity(self) -> None:
        """Accept every push."""

    def overdue(self) -> list[tuple[str, int]]:
        return [("job", 0)]

    def put_image(self, job: str, epoch: int, image: ShardImage, *, placement_id: str) -> None:
        self.images.append(image)
        if len(self.images) > 1:
            self._loop.call_soon_threadsafe(self.put.set)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), OSError(28, "no space")])
async def test_the_journal_is_shortened_again_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The failure is of making an image, and the next round makes another one."""
    monkeypatch.setattr(shard_journal, "LOOK_EACH_S", 0.01)
    journal, replica = FullJournal(), new_held()
    errors = iter([None, error])

    async def take(_: ShardReplica) -> ShardImage:
        if (failure := next(errors, None)) is not None:
            raise failure
        return replica.image()

    with ThreadPoolExecutor(1) as pool:
        kept = ShardJournal(
            cast(Journal, journal),
            pool,
            take=take,
            make=restore,
            on_disk=lambda replica, version: None,
            on_failure=lambda replica: None,
        )
        async with kept:
            kept.start_journaling(replica)
            async with asyncio.timeout(LIMIT_S):
                await journal.put.wait()
    assert next(errors, None) is None
