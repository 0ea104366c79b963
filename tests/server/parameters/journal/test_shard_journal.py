"""The shard journal: what one server writes to its disk about the shards that it leads."""

import asyncio
import errno
import os
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes.served_process import awaited

from shoal_proto.errors import Overloaded, RetryError, ShoalError
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.images.shard_image import ShardImage
from shoal_server.parameters.journal import log, shard_journal
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.journal.shard_journal import ShardJournal
from shoal_server.parameters.shard.dense import new_dense_shard
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.tables.restore import restore

LIMIT_S = 10.0


def new_led(epoch: int, shard_id: int = 0) -> ShardReplica:
    blocks = [Block(parameter="p", num_elements=2)]
    spec = Shard(shard_id=shard_id, epoch=epoch, dtype="float32", blocks=blocks)
    sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
    return ShardReplica("job", new_dense_shard(spec, sgd, bytearray(8)), ReplicaRole.PRIMARY, epoch)


def push(replica: ShardReplica) -> UpdateRecord:
    """Apply one more push, and return its record."""
    version = replica.state.version + 1
    record = PushRecord(session="s", sequence=version, version=version, blocks=[0])
    update = UpdateRecord(record, struct.pack("2f", 1.0, 1.0))
    replica.state.replay(update)
    return update


async def make_image(replica: ShardReplica) -> ShardImage:
    return replica.image()


class FailingDisk:
    """Disk on which syncs fail while `is_broken` is set."""

    def __init__(self) -> None:
        self.is_broken = False

    def fsync(self, descriptor: int) -> None:
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        os.fsync(descriptor)

    def fail(self, journal: Journal) -> None:
        """Fail from now on; return once the journal knows."""
        self.is_broken = True
        assert journal.forget("another job", 0).exception(LIMIT_S) is not None

    def mend(self, journal: Journal) -> None:
        """Work from now on; return once the journal knows."""
        self.is_broken = False
        awaited(lambda: journal.failure is None, LIMIT_S, "the disk works")


class MendingJournal(Journal):
    """Journal whose disk works again right after it has refused a record."""

    def __init__(self, config: JournalConfig, disk: FailingDisk) -> None:
        super().__init__(config, fsync=disk.fsync)
        self._disk = disk

    def append(self, job: str, shard_id: int, epoch: int, record: UpdateRecord) -> "Future[None]":
        done = super().append(job, shard_id, epoch, record)
        if done.done() and done.exception() is not None:
            self._disk.mend(self)
        return done


class Reports:
    """Reports of a shard journal: versions on disk, and the reason of each interruption."""

    def __init__(self) -> None:
        self._all: asyncio.Queue[int | ShoalError] = asyncio.Queue()

    def on_disk(self, replica: ShardReplica, version: int) -> None:
        self._all.put_nowait(version)

    def on_failure(self, replica: ShardReplica) -> None:
        assert replica.why_no_disk is not None
        self._all.put_nowait(replica.why_no_disk)

    async def next(self) -> int | ShoalError:
        return await asyncio.wait_for(self._all.get(), LIMIT_S)


@asynccontextmanager
async def journaling(
    journal: Journal,
    take: Callable[[ShardReplica], Awaitable[ShardImage]] = make_image,
) -> AsyncIterator[tuple[ShardJournal, Reports]]:
    """Run a shard journal, which resumes interrupted journaling at once."""
    reports = Reports()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool, journal:
        patch.setattr(shard_journal, "LOOK_EACH_S", 0.01)
        patch.setattr(log, "RETRY_EACH_S", 0.01)
        kept = ShardJournal(
            journal,
            pool,
            take=take,
            make=restore,
            on_disk=reports.on_disk,
            on_failure=reports.on_failure,
        )
        async with kept:
            yield kept, reports


async def test_no_record_is_written_after_a_refused_one(tmp_path: Path) -> None:
    """The refused record is one of several that waited for the shard's image. A later one on disk
    would make the refused one durable as far as anybody knows."""
    disk, replica, is_taken = FailingDisk(), new_led(epoch=1), asyncio.Event()

    async def take(replica: ShardReplica) -> ShardImage:
        image = replica.image()
        await is_taken.wait()
        return image

    journal = MendingJournal(JournalConfig(directory=tmp_path), disk)
    async with journaling(journal, take) as (kept, reports):
        kept.start_journaling(replica)
        await asyncio.sleep(0)
        for _ in range(2):
            kept.append_update(replica, push(replica))
        disk.fail(journal)
        is_taken.set()
        assert await reports.next() == 1
        assert isinstance(await reports.next(), ShoalError)
        assert await reports.next() == 3
        # Two pushes were applied: the image of version 3 has both.
        found = journal.read("job", 0, restore)
        assert found is not None and (found.state.version, found.num_replayed) == (3, 0)


async def test_a_late_success_does_not_end_an_interruption(tmp_path: Path) -> None:
    """Version 2 is on disk, but the event loop learns that only after the refusal of version 3."""
    disk, replica = FailingDisk(), new_led(epoch=1)
    journal = Journal(JournalConfig(directory=tmp_path), fsync=disk.fsync)
    async with journaling(journal) as (kept, reports):
        kept.start_journaling(replica)
        assert await reports.next() == 1
        kept.append_update(replica, push(replica))
        journal.forget("another job", 0).result(LIMIT_S)
        disk.fail(journal)
        kept.append_update(replica, push(replica))
        assert isinstance(await reports.next(), ShoalError)
        disk.mend(journal)
        assert await reports.next() == 3


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no image")])
async def test_any_failure_of_an_image_interrupts_journaling(
    tmp_path: Path, error: Exception
) -> None:
    """Durable pushes are refused with the reason meanwhile, and the next image is tried."""
    replica, errors = new_led(epoch=1), [error]

    async def take(replica: ShardReplica) -> ShardImage:
        if errors:
            raise errors.pop()
        return replica.image()

    async with journaling(Journal(JournalConfig(directory=tmp_path)), take) as (kept, reports):
        kept.start_journaling(replica)
        kept.append_update(replica, push(replica))
        why = await reports.next()
        assert isinstance(why, RetryError) and repr(error) in str(why)
        assert await reports.next() == 2


async def test_records_that_wait_for_an_image_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes are refused while too many wait, and accepted once the image is on disk."""
    monkeypatch.setattr(shard_journal, "MAX_WAITING_BYTES", 15)
    replica, is_taken = new_led(epoch=1), asyncio.Event()

    async def take(replica: ShardReplica) -> ShardImage:
        image = replica.image()
        await is_taken.wait()
        return image

    async with journaling(Journal(JournalConfig(directory=tmp_path)), take) as (kept, reports):
        kept.start_journaling(replica)
        await asyncio.sleep(0)
        kept.append_update(replica, push(replica))
        replica.check_capacity()
        kept.append_update(replica, push(replica))
        with pytest.raises(Overloaded, match="no image of shard 0"):
            replica.check_capacity()
        is_taken.set()
        assert [await reports.next() for _ in range(3)] == [1, 2, 3]
        replica.check_capacity()


class HeldDisk:
    """Disk on which a sync waits while `goes_on` is not set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()

    def fsync(self, descriptor: int) -> None:
        assert self.goes_on.wait(LIMIT_S)
        os.fsync(descriptor)


async def test_a_shard_of_a_new_run_replaces_that_of_the_last_run(tmp_path: Path) -> None:
    """The new run's epoch is lower, and the disk is slow to forget the old shard."""
    loop, disk = asyncio.get_running_loop(), HeldDisk()
    on_disk: asyncio.Queue[int] = asyncio.Queue()

    async def take(replica: ShardReplica) -> ShardImage:
        return replica.image()

    def note_epoch(replica: ShardReplica, version: int) -> None:
        on_disk.put_nowait(replica.epoch)

    config = JournalConfig(directory=tmp_path)
    with ThreadPoolExecutor(1) as pool, Journal(config, fsync=disk.fsync) as journal:
        kept = ShardJournal(
            journal,
            pool,
            take=take,
            make=restore,
            on_disk=note_epoch,
            on_failure=lambda replica: None,
        )
        async with kept, asyncio.timeout(LIMIT_S):
            last, now = new_led(epoch=5), new_led(epoch=1)
            kept.start_journaling(last)
            assert await on_disk.get() == 5
            disk.goes_on.clear()
            kept.end(last)
            kept.release_job("job", but=())
            kept.start_journaling(now)
            loop.call_later(0.1, disk.goes_on.set)
            assert await on_disk.get() == 1
    (found,) = Journal(config).recover(restore)
    assert found.epoch == 1


async def test_an_image_is_stored_with_its_own_epoch(tmp_path: Path) -> None:
    """Durable records after the image are still replayed if the shard is handed over, and enters
    the next epoch, before the image is written."""
    config, goes_on = JournalConfig(directory=tmp_path), threading.Event()
    taken: list[int] = []

    class HeldJournal(Journal):
        def overdue(self) -> Sequence[tuple[str, int]]:
            return (("job", 0),) if replica.state.version == 2 else ()

        def read(self, *what: Any) -> Any:
            goes_on.wait(LIMIT_S)
            return super().read(*what)

    async def take(replica: ShardReplica) -> ShardImage:
        taken.append(replica.state.version)
        return replica.image()

    replica = new_led(epoch=3)
    async with journaling(HeldJournal(config), take) as (kept, reports):
        kept.start_journaling(replica)
        assert await reports.next() == 1
        reading = asyncio.ensure_future(kept.read("job", 1))
        await asyncio.sleep(0)
        kept.append_update(replica, push(replica))
        assert await reports.next() == 2
        await until(lambda: len(taken) == 2)
        kept.append_update(replica, push(replica))
        assert await reports.next() == 3
        kept.end(replica)
        replica.epoch = 4
        goes_on.set()
        await reading
        await kept.read("job", 0)
    (found,) = Journal(config).recover(restore)
    assert (found.epoch, found.state.version) == (3, 3)


def make_unreadable(directory: Path) -> None:
    """Replace the only image of a journal by a directory."""
    (path,) = directory.glob("images/job/*")
    path.unlink()
    path.mkdir()


async def test_a_shard_whose_image_cannot_be_read_counts_as_missing(tmp_path: Path) -> None:
    """An error would end the task that loads the shard, which would not report it as missing."""

    async def take(replica: ShardReplica) -> ShardImage:
        return replica.image()

    config = JournalConfig(directory=tmp_path)
    with ThreadPoolExecutor(1) as pool, Journal(config) as journal:
        with new_led(epoch=1).image() as image:
            journal.put_image("job", 1, image)
        make_unreadable(tmp_path)
        kept = ShardJournal(
            journal,
            pool,
            take=take,
            make=restore,
            on_disk=lambda replica, version: None,
            on_failure=lambda replica: None,
        )
        assert await kept.read("job", 0) is None


class SlowJournal(Journal):
    """Journal that writes no image until `goes_on` is set."""

    def __init__(self, config: JournalConfig) -> None:
        super().__init__(config)
        self.goes_on = threading.Event()

    def put_image(self, *what: Any, **more: Any) -> None:
        self.goes_on.wait(LIMIT_S)
        super().put_image(*what, **more)


async def test_one_image_at_a_time_is_open_and_keeps_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that begins to lead all shards at once does not need twice their memory. Pushes to
    shards whose turn has not come are in their images, and wait for nothing."""
    monkeypatch.setattr(shard_journal, "MAX_WAITING_BYTES", 8)
    taken: list[ShardReplica] = []

    async def take(replica: ShardReplica) -> ShardImage:
        taken.append(replica)
        return replica.image()

    shards = [new_led(epoch=1, shard_id=i) for i in range(3)]
    config = JournalConfig(directory=tmp_path)
    journal = SlowJournal(config)
    async with journaling(journal, take) as (kept, reports):
        for each in shards:
            kept.start_journaling(each)
        for _ in range(2):
            await asyncio.sleep(0)
        for each in shards:
            for _ in range(2):
                kept.append_update(each, push(each))
        assert taken == shards[:1]
        with pytest.raises(Overloaded, match="no image of shard 0 yet"):
            shards[0].check_capacity()
        for each in shards[1:]:
            each.check_capacity()
        journal.goes_on.set()
        for _ in range(5):
            await reports.next()
    recovered = Journal(config).recover(restore)
    assert {each.state.shard_id: each.state.version for each in recovered} == {0: 3, 1: 3, 2: 3}


async def test_a_shard_that_is_kept_for_another_primary_does_not_fill_the_journal(
    tmp_path: Path,
) -> None:
    """An image replaces the shard's records, as for led shards. So pushes are taken again, and the
    disk still has the shard as it was."""
    config = JournalConfig(directory=tmp_path, segment_bytes=500, max_bytes=2000)
    journal = Journal(config)
    async with journaling(journal) as (kept, reports), asyncio.timeout(LIMIT_S):
        left, led = new_led(epoch=3), new_led(epoch=1, shard_id=1)
        for replica in (left, led):
            kept.start_journaling(replica, "placement")
            assert await reports.next() == 1
        for _ in range(3):
            kept.append_update(left, push(left))
            await reports.next()
        kept.end(left)
        for _ in range(60):
            kept.append_update(led, push(led))
            await reports.next()
        await asyncio.to_thread(awaited, lambda: has_capacity(journal), LIMIT_S, "it shrinks")
        assert kept.keeps("job", 0)
    found = {each.state.shard_id: each for each in Journal(config).recover(restore)}
    assert (found[0].epoch, found[0].state.version) == (3, 4)
    assert found[0].placement_id == "placement"
    assert found[1].state.version == led.state.version


class OverdueJournal(Journal):
    """Journal of a shard whose old records always fill the disk. Reads wait until `goes_on` is
    set."""

    def __init__(self, config: JournalConfig) -> None:
        super().__init__(config)
        self.num_looks = 0
        self.num_reads = 0
        self.goes_on = threading.Event()

    def overdue(self) -> Sequence[tuple[str, int]]:
        self.num_looks += 1
        return (("job", 0),)

    def read(self, *what: Any) -> Any:
        self.num_reads += 1
        self.goes_on.wait(LIMIT_S)
        return super().read(*what)


async def until(is_so: Callable[[], bool]) -> None:
    await asyncio.to_thread(awaited, is_so, LIMIT_S, "the journal looks for overdue shards")


async def test_a_kept_shard_is_read_to_be_shortened_while_no_image_is_open(tmp_path: Path) -> None:
    """Otherwise two shards would be in memory once more."""
    taken: list[ShardReplica] = []

    async def take(replica: ShardReplica) -> ShardImage:
        taken.append(replica)
        return replica.image()

    journal = OverdueJournal(JournalConfig(directory=tmp_path))
    led = new_led(epoch=1, shard_id=1)
    async with journaling(journal, take) as (kept, reports):
        kept.keep([("job", 0)])
        await until(lambda: journal.num_reads == 1)
        kept.start_journaling(led)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not taken
        journal.goes_on.set()
        assert await reports.next() == 1
        assert taken == [led]


async def test_a_kept_shard_that_cannot_be_read_is_not_read_at_every_look(tmp_path: Path) -> None:
    journal = OverdueJournal(JournalConfig(directory=tmp_path))
    journal.goes_on.set()
    async with journaling(journal) as (kept, _):
        with new_led(epoch=1).image() as image:
            journal.put_image("job", 1, image)
        make_unreadable(tmp_path)
        kept.keep([("job", 0)])
        await until(lambda: journal.num_looks >= 40)
        assert 1 < journal.num_reads < 20
        assert kept.keeps("job", 0)


def has_capacity(journal: Journal) -> bool:
    try:
        journal.check_capacity()
    except Overloaded:
        return False
    return journal.num_bytes <= 1000
