"""The journal: the next process finds each push that was reported as durable, and finds it once."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.processes.served_process import awaited

from shoal_proto.errors import (
    AddressInUse,
    DiskFull,
    InvalidSpec,
    JournalDamaged,
    Overloaded,
    Unavailable,
)
from shoal_proto.v1.replication_pb2 import PushRecord
from shoal_server.core.processes import Holder
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.journal import log
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.journal.log import Journal
from shoal_server.parameters.shard.record import UpdateListener, UpdateRecord

LIMIT_S = 20.0


class Log:
    """A minimal shard: the list of the pushes to it."""

    def __init__(self, shard_id: int, pushed: bytes = b"") -> None:
        self.shard_id = shard_id
        self.pushed = bytearray(pushed)

    @property
    def version(self) -> int:
        return 1 + len(self.pushed)

    @property
    def memory_bytes(self) -> int:
        return len(self.pushed)

    def image(self, keeper: UpdateListener | None = None) -> LoadedImage:
        return LoadedImage(
            kind="log",
            shard_id=self.shard_id,
            version=self.version,
            spec=b"",
            tensors={"pushed": torch.tensor(list(self.pushed), dtype=torch.uint8)},
            sessions=(),
        )

    def replay(self, record: UpdateRecord) -> None:
        assert record.push.version == self.version + 1
        self.pushed += record.data

    def push(self, value: int) -> UpdateRecord:
        record = UpdateRecord(PushRecord(session="s", version=self.version + 1), bytes([value]))
        self.replay(record)
        return record


def make(image: LoadedImage) -> Log:
    return Log(image.shard_id, bytes(image.tensors["pushed"].tolist()))


def config(directory: Path, **changes: int) -> JournalConfig:
    return JournalConfig(directory=directory, **changes)


def contents(directory: Path) -> dict[tuple[str, int], tuple[int, bytes]]:
    """Return epoch and pushes of every shard that a new process recovers."""
    with Journal(config(directory)) as journal:
        return contents_of(journal)


def contents_of(journal: Journal) -> dict[tuple[str, int], tuple[int, bytes]]:
    return {
        (each.job, each.state.shard_id): (each.epoch, bytes(each.state.pushed))
        for each in journal.recover(make)
    }


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("segment-*"))


def test_an_image_of_a_shard_that_was_forgotten_meanwhile_is_dropped(tmp_path: Path) -> None:
    """The shard was read for it before. Another image, of the shard's next run, counts."""
    old, new = Log(0, b"abc"), Log(0)
    with Journal(config(tmp_path)) as journal:
        journal.put_image("job", 5, old.image())
        number = journal.next_number
        journal.forget("job", 0).result(LIMIT_S)
        journal.put_image("job", 5, old.image(), number=number)
        assert contents_of(journal) == {}
        journal.put_image("job", 1, new.image())
        journal.put_image("job", 5, old.image(), number=number)
        assert contents_of(journal) == {("job", 0): (1, b"")}


def test_the_next_process_recovers_all_pushes(tmp_path: Path) -> None:
    shards = [Log(shard_id) for shard_id in range(3)]
    with Journal(config(tmp_path)) as journal:
        for shard in shards:
            journal.put_image("job", 1, shard.image())
        for value in range(50):
            journal.append("job", value % 3, 1, shards[value % 3].push(value))
    assert contents(tmp_path) == {("job", s.shard_id): (1, bytes(s.pushed)) for s in shards}


def test_a_journal_is_continued_over_restarts(tmp_path: Path) -> None:
    for start in (0, 10, 20):
        with Journal(config(tmp_path)) as journal:
            recovered = journal.recover(make)
            shard = recovered[0].state if recovered else Log(0)
            if not recovered:
                journal.put_image("job", 1, shard.image())
            for value in range(start, start + 10):
                journal.append("job", 0, 1, shard.push(value)).result(LIMIT_S)
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(30)))}


def test_an_image_removes_the_segments_that_it_replaces(tmp_path: Path) -> None:
    shard = Log(0)
    with Journal(config(tmp_path, segment_bytes=200)) as journal:
        journal.put_image("job", 1, shard.image())
        for value in range(100):
            journal.append("job", 0, 1, shard.push(value)).result(LIMIT_S)
        assert len(segments(tmp_path)) > 1
        journal.put_image("job", 1, shard.image())
        # After the last push the writer may still be about to begin a segment.
        awaited(lambda: len(segments(tmp_path)) == 1, LIMIT_S, "one segment is left")
        journal.append("job", 0, 1, shard.push(100)).result(LIMIT_S)
    assert len(list((tmp_path / "images" / "job").iterdir())) == 1
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(101)))}


def test_a_shard_without_new_pushes_does_not_keep_the_log(tmp_path: Path) -> None:
    idle, busy = Log(0), Log(1)
    with Journal(config(tmp_path, segment_bytes=200, max_bytes=4000)) as journal:
        for shard in (idle, busy):
            journal.put_image("job", 1, shard.image())
        journal.append("job", 0, 1, idle.push(7)).result(LIMIT_S)
        for value in range(200):
            journal.append("job", 1, 1, busy.push(value)).result(LIMIT_S)
            for job, shard_id in journal.overdue():
                journal.put_image(job, 1, (idle, busy)[shard_id].image())
            journal.check_capacity()
        assert journal.num_bytes <= 4000
    assert contents(tmp_path) == {("job", 0): (1, b"\7"), ("job", 1): (1, bytes(range(200)))}


def test_a_full_journal_is_an_error_until_an_image(tmp_path: Path) -> None:
    shard = Log(0)
    with Journal(config(tmp_path, segment_bytes=200, max_bytes=1000)) as journal:
        journal.put_image("job", 1, shard.image())
        for value in range(20):
            journal.append("job", 0, 1, shard.push(value)).result(LIMIT_S)
        assert list(journal.overdue()) == [("job", 0)]
        with pytest.raises(Overloaded, match="grown as large as it may"):
            journal.check_capacity()
        journal.put_image("job", 1, shard.image())
        journal.check_capacity()
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(20)))}


def test_a_forgotten_shard_is_not_recovered(tmp_path: Path) -> None:
    """A shard that the server gets again after that starts from its new image."""
    first, other = Log(0), Log(1)
    with Journal(config(tmp_path)) as journal:
        for shard in (first, other):
            journal.put_image("job", 1, shard.image())
        for value in range(5):
            journal.append("job", 0, 1, first.push(value))
            journal.append("job", 1, 1, other.push(value))
        journal.forget("job", 0).result(LIMIT_S)
    assert contents(tmp_path) == {("job", 1): (1, bytes(range(5)))}
    second = Log(0, b"\x09")
    with Journal(config(tmp_path)) as journal:
        journal.put_image("job", 3, second.image())
        journal.append("job", 0, 3, second.push(8)).result(LIMIT_S)
    assert contents(tmp_path) == {("job", 0): (3, b"\x09\x08"), ("job", 1): (1, bytes(range(5)))}


def test_a_shard_can_be_read_while_another_is_forgotten(tmp_path: Path) -> None:
    """The other shard's segments are removed after the reading has begun."""
    other, shard = Log(0), Log(1)
    with Journal(config(tmp_path, segment_bytes=200)) as journal:
        for each in (other, shard):
            journal.put_image("job", 1, each.image())
        for value in range(20):
            journal.append("job", 0, 1, other.push(value)).result(LIMIT_S)
        for value in range(20):
            journal.append("job", 1, 1, shard.push(value)).result(LIMIT_S)
        oldest = segments(tmp_path)[0]

        def make_late(image: LoadedImage) -> Log:
            journal.forget("job", 0).result(LIMIT_S)
            awaited(lambda: oldest not in segments(tmp_path), LIMIT_S, "the segment is removed")
            return make(image)

        found = journal.read("job", 1, make_late)
    assert found is not None and bytes(found.state.pushed) == bytes(range(20))


def test_a_slow_disk_refuses_pushes_with_a_reason(tmp_path: Path) -> None:
    go_on = threading.Event()
    go_on.set()

    def slow(descriptor: int) -> None:
        assert go_on.wait(LIMIT_S)
        os.fsync(descriptor)

    shard = Log(0)
    with Journal(config(tmp_path, max_pending_bytes=2000), fsync=slow) as journal:
        journal.put_image("job", 1, shard.image())
        go_on.clear()
        waiting = [journal.append("job", 0, 1, shard.push(value)) for value in range(20)]
        with pytest.raises(Overloaded, match="the disk of the journal is too slow"):
            journal.check_capacity()
        assert not any(done.done() for done in waiting)
        go_on.set()
        for done in waiting:
            done.result(LIMIT_S)
        journal.check_capacity()
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(20)))}


def test_pushes_during_a_sync_share_the_next_one(tmp_path: Path) -> None:
    go_on, num_syncs = threading.Event(), 0
    go_on.set()

    def counting(descriptor: int) -> None:
        nonlocal num_syncs
        assert go_on.wait(LIMIT_S)
        num_syncs += 1
        os.fsync(descriptor)

    shard = Log(0)
    with Journal(config(tmp_path), fsync=counting) as journal:
        journal.put_image("job", 1, shard.image())
        before = num_syncs
        go_on.clear()
        waiting = [journal.append("job", 0, 1, shard.push(value)) for value in range(200)]
        go_on.set()
        for done in waiting:
            done.result(LIMIT_S)
        assert num_syncs - before <= 2
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(200)))}


class Disk:
    """Disk that refuses every sync while it has an `error`."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.refused = threading.Event()

    def fsync(self, descriptor: int) -> None:
        if self.error is not None:
            self.refused.set()
            raise self.error
        os.fsync(descriptor)


FAILURES = {
    "full": (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
    "broken": (OSError(errno.EIO, "Input/output error"), Unavailable),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failed_disk_is_reported_and_tried_again(tmp_path: Path, kind: str) -> None:
    """Durable pushes get the error, and pushes that need no disk continue. Once the disk works and
    after another image, the journal has all pushes."""
    error, expected = FAILURES[kind]
    disk, shard = Disk(), Log(0)
    with Journal(config(tmp_path), fsync=disk.fsync) as journal:
        journal.put_image("job", 1, shard.image())
        journal.append("job", 0, 1, shard.push(1)).result(LIMIT_S)
        disk.error = error
        with pytest.raises(expected, match=str(error.strerror)):
            journal.append("job", 0, 1, shard.push(2)).result(LIMIT_S)
        with pytest.raises(expected):
            journal.append("job", 0, 1, shard.push(3)).result(LIMIT_S)
        assert isinstance(journal.failure, expected)
        journal.check_capacity()
        disk.error = None
        awaited(lambda: journal.failure is None, LIMIT_S, "the disk works")
        journal.put_image("job", 1, shard.image())
        journal.append("job", 0, 1, shard.push(4)).result(LIMIT_S)
    assert contents(tmp_path) == {("job", 0): (1, b"\1\2\3\4")}


def test_a_process_that_ends_while_the_disk_fails_loses_no_acknowledged_push(
    tmp_path: Path,
) -> None:
    """The next process recovers the acknowledged pushes, and perhaps the one that failed."""
    disk, shard = Disk(), Log(0)
    with Journal(config(tmp_path), fsync=disk.fsync) as journal:
        journal.put_image("job", 1, shard.image())
        journal.append("job", 0, 1, shard.push(1)).result(LIMIT_S)
        disk.error = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(DiskFull):
            journal.append("job", 0, 1, shard.push(2)).result(LIMIT_S)
    (_, pushed) = contents(tmp_path)["job", 0]
    assert pushed in (b"\1", b"\1\2")


def test_a_shard_forgotten_while_the_disk_fails_is_not_recovered(tmp_path: Path) -> None:
    """The journal forgets the shard once the disk works, without another call."""
    disk, shard = Disk(), Log(0)
    with Journal(config(tmp_path), fsync=disk.fsync) as journal:
        journal.put_image("job", 1, shard.image())
        disk.error = OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(DiskFull):
            journal.append("job", 0, 1, shard.push(1)).result(LIMIT_S)
        journal.forget("job", 0)
        disk.error = None
        awaited(lambda: journal.failure is None, LIMIT_S, "the disk works")
    assert contents(tmp_path) == {}


def test_a_segment_that_cannot_be_begun_leaves_the_last_one_in_use(tmp_path: Path) -> None:
    """The disk has space for pushes but not for a new file: the segment grows beyond its size."""
    disk, shard = Disk(), Log(0)
    opened = Path.open

    def full(path: Path, mode: str = "r", *options: Any, **more: Any) -> Any:
        if mode == "xb":
            disk.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *options, **more)

    with Journal(config(tmp_path, segment_bytes=300)) as journal:
        journal.put_image("job", 1, shard.image())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Path, "open", full)
            for value in range(20):
                journal.append("job", 0, 1, shard.push(value)).result(LIMIT_S)
            assert disk.refused.wait(LIMIT_S)
        for value in range(20, 40):
            journal.append("job", 0, 1, shard.push(value)).result(LIMIT_S)
    assert len(segments(tmp_path)) > 1
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(40)))}


@contextmanager
def no_new_segments(error: int) -> Iterator[None]:
    opened = Path.open

    def refused(path: Path, mode: str = "r", *options: Any, **more: Any) -> Any:
        if mode == "xb":
            raise OSError(error, os.strerror(error))
        return opened(path, mode, *options, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "open", refused)
        yield


def test_an_image_counts_although_old_segments_cannot_be_removed(tmp_path: Path) -> None:
    """The next process recovers all pushes, before and after the image."""

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    shard = Log(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        with Journal(config(tmp_path, segment_bytes=200)) as journal:
            journal.put_image("job", 1, shard.image())
            for value in range(20):
                journal.append("job", 0, 1, shard.push(value)).result(LIMIT_S)
            assert len(segments(tmp_path)) > 2
            journal.put_image("job", 1, shard.image())
            journal.append("job", 0, 1, shard.push(20)).result(LIMIT_S)
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(21)))}


def test_no_segment_is_removed_before_an_older_one(tmp_path: Path) -> None:
    """Later segments stay until the oldest one could be removed: a journal with a gap could not be
    opened again."""
    removed = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".log":
            raise OSError(errno.EIO, "Input/output error", str(path))
        removed(path, missing_ok)

    shard = Log(0)
    with Journal(config(tmp_path, segment_bytes=200)) as journal:
        journal.put_image("job", 1, shard.image())
        for value in range(40):
            journal.append("job", 0, 1, shard.push(value)).result(LIMIT_S)
            if value == 10:
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(Path, "unlink", refused)
                    journal.put_image("job", 1, shard.image())
                assert "segment-000000001.log" in segments(tmp_path)
            if value == 20:
                journal.put_image("job", 1, shard.image())
                assert "segment-000000001.log" not in segments(tmp_path)
    assert contents(tmp_path) == {("job", 0): (1, bytes(range(40)))}


def test_a_server_started_on_a_full_disk_recovers_its_journal(tmp_path: Path) -> None:
    """Durable pushes get an error; journaling resumes once there is space."""
    shard = Log(0)
    with Journal(config(tmp_path)) as journal:
        journal.put_image("job", 1, shard.image())
        journal.append("job", 0, 1, shard.push(1)).result(LIMIT_S)
    with ExitStack() as stack:
        full = stack.enter_context(ExitStack())
        full.enter_context(no_new_segments(errno.ENOSPC))
        journal = stack.enter_context(Journal(config(tmp_path)))
        (found,) = journal.recover(make)
        assert bytes(found.state.pushed) == b"\1"
        assert isinstance(journal.failure, DiskFull)
        journal.check_capacity()
        with pytest.raises(DiskFull):
            journal.append("job", 0, 1, shard.push(2)).result(LIMIT_S)
        full.close()
        awaited(lambda: journal.failure is None, LIMIT_S, "there is space")
        journal.put_image("job", 1, shard.image())
        journal.append("job", 0, 1, shard.push(3)).result(LIMIT_S)
    assert contents(tmp_path) == {("job", 0): (1, b"\1\2\3")}


def test_a_server_that_ends_on_a_full_disk_leaves_its_journal_unchanged(tmp_path: Path) -> None:
    shard = Log(0)
    with Journal(config(tmp_path)) as journal:
        journal.put_image("job", 1, shard.image())
    with no_new_segments(errno.ENOSPC), Journal(config(tmp_path)) as journal:
        ended = journal.forget("job", 0)
    assert not ended.done() or ended.exception() is not None
    assert contents(tmp_path) == {("job", 0): (1, b"")}


def test_a_disk_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    with no_new_segments(errno.EROFS), pytest.raises(Unavailable, match="cannot be written"):
        Journal(config(tmp_path)).__enter__()


class OnFullDisk:
    """A file that can be overwritten but cannot grow."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > os.fstat(self._file.fileno()).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_the_owner_of_a_journal_is_recorded_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's incarnation is overwritten in place, and so needs no more space. A longer one is
    refused."""
    with Journal(config(tmp_path)) as journal:
        journal.own(Holder("ps-0", "one"))
    open_lock_file = log.open_lock_file
    with monkeypatch.context() as patch:
        patch.setattr(log, "open_lock_file", lambda path: OnFullDisk(open_lock_file(path)))
        full = Journal(config(tmp_path))
    with full as journal:
        assert journal.own(Holder("ps-0", "two")) == "one"
        with pytest.raises(DiskFull, match="start this server again"):
            journal.own(Holder("ps-0", "a longer name"))
    with Journal(config(tmp_path)) as journal:
        assert journal.own(Holder("ps-0", "six")) == "two"


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    with Journal(config(tmp_path)), pytest.raises(AddressInUse, match="another server"):
        Journal(config(tmp_path))
    assert contents(tmp_path) == {}


def test_a_journal_of_another_server_is_refused(tmp_path: Path) -> None:
    """The server has the wrong id or directory, and would drop shards that no other server has."""
    first, again = Holder("ps-0", "one"), Holder("ps-0", "two")
    shard = Log(0)
    with Journal(config(tmp_path)) as journal:
        assert journal.own(first) == ""
        journal.put_image("job", 1, shard.image())
    with Journal(config(tmp_path)) as journal, pytest.raises(InvalidSpec, match="of server ps-0"):
        journal.own(Holder("ps-1", "one"))
    with Journal(config(tmp_path)) as journal:
        assert journal.own(again) == "one"
    assert contents(tmp_path) == {("job", 0): (1, b"")}


def test_a_journal_whose_directory_is_gone_makes_nothing_durable(tmp_path: Path) -> None:
    """Writes to a removed file succeed, so that the journal has to check."""
    directory, shard = tmp_path / "journal", Log(0)
    with Journal(config(directory)) as journal:
        journal.put_image("job", 1, shard.image())
        journal.append("job", 0, 1, shard.push(1)).result(LIMIT_S)
        shutil.rmtree(directory)
        with pytest.raises(Unavailable, match="removed"):
            journal.append("job", 0, 1, shard.push(2)).result(LIMIT_S)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write two shards to several segments, with pushes to them in turn, each synced separately."""
    directory = tmp_path_factory.mktemp("journal")
    shards = [Log(0), Log(1)]
    with Journal(config(directory, segment_bytes=300)) as journal:
        for shard in shards:
            journal.put_image("job", 1, shard.image())
        for value in range(30):
            journal.append("job", value % 2, 1, shards[value % 2].push(value)).result(LIMIT_S)
    yield directory


def copied(written: Path, directory: Path, change: Callable[[Path], None]) -> Path:
    for path in written.rglob("*"):
        if path.is_file():
            target = directory / path.relative_to(written)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    change(directory)
    return directory


def pushed_of(directory: Path) -> list[int]:
    found = contents(directory)
    return sorted(found["job", 0][1] + found["job", 1][1])


def test_the_last_segment_cut_at_any_byte_has_the_pushes_before(
    written: Path, tmp_path: Path
) -> None:
    *_, last = segments(written)
    lengths = []
    for length in range((written / last).stat().st_size + 1):

        def cut(directory: Path, length: int = length) -> None:
            path = directory / last
            path.write_bytes(path.read_bytes()[:length])

        pushed = pushed_of(copied(written, tmp_path / str(length), cut))
        assert pushed == list(range(len(pushed)))
        lengths.append(len(pushed))
    assert lengths == sorted(lengths) and lengths[-1] == 30


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_reported_or_loses_only_the_last_push(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(segments(written)))
    bit = data.draw(st.integers(0, 8 * (written / name).stat().st_size - 1))

    def flip(directory: Path) -> None:
        path = directory / name
        changed = bytearray(path.read_bytes())
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)

    directory = copied(written, tmp_path_factory.mktemp("flipped"), flip)
    try:
        pushed = pushed_of(directory)
    except JournalDamaged as error:
        assert error.details["file"].startswith("segment-")
        return
    assert name == segments(written)[-1] and pushed in (list(range(29)), list(range(30)))


def test_a_missing_segment_is_reported(written: Path, tmp_path: Path) -> None:
    second = segments(written)[1]
    directory = copied(written, tmp_path, lambda directory: (directory / second).unlink())
    with pytest.raises(JournalDamaged, match="records are missing in the journal"):
        contents(directory)


def test_a_damaged_image_is_reported_with_its_shard(written: Path, tmp_path: Path) -> None:
    def damage(directory: Path) -> None:
        path = min((directory / "images" / "job").iterdir())
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    directory = copied(written, tmp_path, damage)
    with pytest.raises(JournalDamaged, match="shard 0"):
        contents(directory)
