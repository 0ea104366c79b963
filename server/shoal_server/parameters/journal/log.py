"""The journal: a server's log of applied pushes on its own disk, for durable acknowledgement.

    journal = Journal(JournalConfig(directory=...))
    with journal:
        for shard in journal.recover(make): ...     shards of the previous process
        journal.put_image(job, epoch, image)        before a shard's first record
        journal.append(job, shard_id, epoch, record).result()

Records that are appended during one `fsync` share the next one. A shard's image, written now and
then, replaces its records up to the image's version.

While the disk fails or is full, no new records are accepted. Records accepted earlier stay in
memory, and are written once the disk works again. `failure` has the error.

The directory has the files `segment-000000001.log` and so on, the folder `images`, and the file
`lock` with the owner's server id and incarnation.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, TypeVar

import structlog

from shoal_proto.errors import (
    AddressInUse,
    DiskFull,
    InvalidSpec,
    Overloaded,
    ShoalError,
    Unavailable,
)
from shoal_server.core.processes import Holder
from shoal_server.parameters.images.image import Image, LoadedImage
from shoal_server.parameters.journal.config import START_BYTES, JournalConfig
from shoal_server.parameters.journal.images import JournalImages, StoredImage
from shoal_server.parameters.journal.index import JournalSegment, Key
from shoal_server.parameters.journal.replay import RecoveredShard, read_index, replay
from shoal_server.parameters.journal.segment_format import JournalEntry, encode, start
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.snapshots.storage import sync_folder

log = structlog.get_logger(__name__)

State = TypeVar("State", bound=AnyShard)
ENTRY_BYTES = 256
"""Memory counted for an entry in addition to its data."""
RETRY_EACH_S = 0.5
"""Interval between attempts to write to a failed disk."""
MAX_OWNER_BYTES = 1024
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Waiting(NamedTuple):
    number: int
    entry: JournalEntry
    done: "Future[None]"


class Journal:
    """A journal that any thread may use. `with` runs its writer. At the end, all appended entries
    are on disk unless the disk failed."""

    def __init__(self, config: JournalConfig, *, fsync: Callable[[int], None] = os.fsync) -> None:
        """Raises AddressInUse if another process uses the directory, JournalDamaged, and OSError or
        Unavailable if the disk fails."""
        self._config = config
        self._fsync = fsync
        config.directory.mkdir(parents=True, exist_ok=True)
        self._lock_file = open_lock_file(config.directory / "lock")
        self._images = JournalImages(config.directory / "images")
        self._index, self._next_number = read_index(config.directory, self._images)
        self._first_number = self._next_number
        self._wake = threading.Condition()
        self._queue: list[_Waiting] = []
        self._pending_bytes = 0
        self._closing = False
        self._failure: ShoalError | None = None
        self._file: FileIO | None = None
        self._thread = threading.Thread(target=self._write_for_ever, name="shoal-journal")

    def own(self, owner: Holder) -> str:
        """Set the owner; return the previous owner's incarnation, empty if there was none. That
        owner has ended or closed the journal.

        Raises InvalidSpec for another server's journal, which may have that server's only copies.
        Raises DiskFull or Unavailable if the owner cannot be written.
        """
        self._lock_file.seek(0)
        before = self._lock_file.read(MAX_OWNER_BYTES).decode(errors="replace")
        server_id, _, incarnation = before.strip().partition(" ")
        if server_id and server_id != owner.server_id:
            raise InvalidSpec(
                f"the journal in {self._config.directory} is another server's",
                seen=f"a journal of server {server_id}",
                expected=f"a journal of server {owner.server_id}, or an empty directory",
                fix=f"Start this server with --id {server_id}, or give it a different directory.",
            )
        self._write_owner(f"{owner.server_id} {owner.incarnation}".encode())
        return incarnation

    def _write_owner(self, owner: bytes) -> None:
        """Overwrite the owner in place, which works on a full disk."""
        try:
            self._lock_file.seek(0)
            self._lock_file.write(owner)
            self._lock_file.flush()
            self._lock_file.truncate(len(owner))
        except OSError as error:
            fix = "Free space there, or repair the disk, and start this server again."
            raise _disk_failure(self._config.directory, error, fix=fix) from error

    def recover(self, make: Callable[[LoadedImage], State]) -> Sequence[RecoveredShard[State]]:
        """Every shard as of its last record on disk. Call it before `append`. `make` makes a shard
        from its image.

        Raises JournalDamaged, naming the file, also if `make` raises MalformedMessage; Unavailable
        or OSError if a file cannot be read; and `make`'s other errors.
        """
        return replay(self._config.directory, self._images, self._index, make)

    def read(
        self, job: str, shard_id: int, make: Callable[[LoadedImage], State]
    ) -> RecoveredShard[State] | None:
        """A shard from disk; None if the journal lacks it. Append none of its records meanwhile.
        Blocks. Raises what `recover` raises."""
        with self._wake:
            index = self._index.of((job, shard_id))
        recovered = replay(self._config.directory, self._images, index, make)
        return recovered[0] if recovered else None

    def __enter__(self) -> "Journal":
        """Start the writer. Raises Unavailable if nothing can be written. On a full disk, the
        writer waits for space, and only durable pushes fail."""
        try:
            self._begin_segment(self._first_number)
        except OSError as error:
            failure = _disk_failure(self._config.directory, error)
            if not isinstance(failure, DiskFull):
                self._lock_file.close()
                raise failure from error
            self._fail(error, ())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        if self._file is not None:
            self._file.close()
        self._lock_file.close()

    @property
    def num_bytes(self) -> int:
        """Size of all segments, without images."""
        with self._wake:
            return self._index.num_bytes

    @property
    def failure(self) -> ShoalError | None:
        """DiskFull or Unavailable while the disk cannot be written."""
        with self._wake:
            return self._failure

    def check_capacity(self) -> None:
        """Raise Overloaded if the journal is full, or its disk too slow. Nothing is raised while
        the disk cannot be written: only durable pushes fail then."""
        with self._wake:
            failure, pending_bytes = self._failure, self._pending_bytes
            num_bytes = self._index.num_bytes
        if failure is not None:
            return
        if pending_bytes > self._config.max_pending_bytes:
            raise Overloaded(
                "the disk of the journal is too slow",
                seen=f"{pending_bytes} bytes waiting for the disk",
                expected=f"at most {self._config.max_pending_bytes}",
                fix="Retry a little later; give the journal a faster disk.",
            )
        if num_bytes > self._config.max_bytes:
            raise Overloaded(
                "the journal has grown as large as it may",
                seen=f"{num_bytes} bytes",
                expected=f"at most {self._config.max_bytes}",
                fix="Retry a little later: new images of shards free old segments.",
            )

    def append(self, job: str, shard_id: int, epoch: int, record: UpdateRecord) -> "Future[None]":
        """Append a push, in the order of versions; the future is done once the push is on disk.

        The queue has no bound, as the push is applied already: call `check_capacity` before the
        push. The future fails with DiskFull or Unavailable if the disk fails. Then the push may be
        on disk or not: a new image must come before the shard's next push.
        """
        return self._enqueue(JournalEntry(job, shard_id, epoch, record))

    def forget(self, job: str, shard_id: int) -> "Future[None]":
        """Append an end entry: this server no longer has the shard. The future is done once the
        entry is on disk. It fails with DiskFull or Unavailable if the disk fails; the entry is
        still written later."""
        return self._enqueue(JournalEntry(job, shard_id, 0, None))

    @property
    def next_number(self) -> int:
        """Log number of the next entry."""
        with self._wake:
            return self._next_number

    def put_image(
        self,
        job: str,
        epoch: int,
        image: Image,
        *,
        placement_id: str = "",
        number: int | None = None,
    ) -> None:
        """Start to journal a shard, or replace its records up to the image's version.

        `placement_id`: `JobAssignments.placement_id`. `number`: `next_number` of the moment that
        the image shows, None for now; an end entry since then makes the image superfluous. Blocks
        until the image is on disk. Raises DiskFull or Unavailable, without a change, if it cannot
        be written. Superfluous files that cannot be removed stay.
        """
        if number is None:
            # Higher than the number of any earlier end entry.
            number = self.next_number
        try:
            kept = self._images.write(job, epoch, number, image, placement_id)
        except Unavailable as error:
            raise _disk_failure(self._config.directory, error) from error
        with self._wake:
            superfluous = self._index.put(kept)
        try:
            self._remove([superfluous])
        except (OSError, Unavailable) as error:
            log.warning("journal_cleanup_failed", reason=str(error))

    def overdue(self) -> Sequence[Key]:
        """Shards that need the oldest segment, once half of `max_bytes` is used. The caller writes
        their images, so that the segment can be removed."""
        with self._wake:
            if self._index.num_bytes <= self._config.max_bytes // 2:
                return ()
            return self._index.overdue()

    def _enqueue(self, entry: JournalEntry) -> "Future[None]":
        done: Future[None] = Future()
        with self._wake:
            failure = self._failure
            # An end entry is queued even while the disk fails: it is small, and not appended again.
            if failure is None or entry.record is None:
                self._queue.append(_Waiting(self._next_number, entry, done))
                self._next_number += 1
                self._pending_bytes += _num_bytes(entry)
                self._wake.notify()
        if failure is not None:
            done.set_exception(failure)
        return done

    def _write_for_ever(self) -> None:
        if not self._begin_with_retries():
            return
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                batch, self._queue = self._queue, []
            if not batch:
                return
            superfluous = self._write_with_retries(batch)
            if superfluous is None:
                return
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_result(None)
            self._tidy(superfluous, batch[-1].number + 1)

    def _begin_with_retries(self) -> bool:
        """Begin a segment once the disk has space. False if the journal is closed first."""
        while self._file is None:
            with self._wake:
                if self._wake.wait_for(lambda: self._closing, RETRY_EACH_S):
                    return False
            try:
                self._begin_segment(self._first_number)
            except OSError as error:
                self._fail(error, ())
            else:
                self._clear_failure()
        return True

    def _write_with_retries(self, batch: Sequence[_Waiting]) -> Sequence[StoredImage | None] | None:
        """Write a batch, with retries; return superfluous images. None if the journal is closed
        first."""
        while True:
            try:
                superfluous = self._write(batch)
            except OSError as error:
                self._fail(error, batch)
            else:
                self._clear_failure()
                return superfluous
            with self._wake:
                if self._wake.wait_for(lambda: self._closing, RETRY_EACH_S):
                    return None

    def _write(self, batch: Sequence[_Waiting]) -> Sequence[StoredImage | None]:
        assert self._file is not None
        segment = self._index.segments[-1]
        synced_bytes = segment.num_bytes
        data = b"".join(encode(entry, number, synced_bytes) for number, entry, _ in batch)
        # A failed attempt may have written part of the batch: begin after the last synced byte.
        self._file.truncate(synced_bytes)
        self._file.seek(synced_bytes)
        _write_all(self._file, data)
        self._fsync(self._file.fileno())
        if not os.fstat(self._file.fileno()).st_nlink:
            # Writing to a removed file succeeds, but its data are lost.
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(self._file.name))
        with self._wake:
            segment.num_bytes += len(data)
            self._pending_bytes -= sum(_num_bytes(entry) for _, entry, _ in batch)
            return [self._index.note(number, entry) for number, entry, _ in batch]

    def _tidy(self, superfluous: Sequence[StoredImage | None], next_number: int) -> None:
        """Failures of the disk are only logged: the newest segment then keeps growing."""
        try:
            self._remove(superfluous)
            if self._index.segments[-1].num_bytes >= self._config.segment_bytes:
                self._begin_segment(next_number)
        except (OSError, Unavailable) as error:
            log.warning("journal_cleanup_failed", reason=str(error))

    def _begin_segment(self, first_number: int) -> None:
        segments = self._index.segments
        segment = JournalSegment(
            segments[-1].index + 1 if segments else 1, first_number, START_BYTES
        )
        path = self._config.directory / segment.file
        file = path.open("xb", buffering=0)
        try:
            _write_all(file, start(first_number))
            self._fsync(file.fileno())
            sync_folder(self._config.directory)
        except OSError:
            file.close()
            path.unlink()
            raise
        with self._wake:
            last, self._file = self._file, file
            segments.append(segment)
        if last is not None:
            last.close()
        self._remove(())

    def _remove(self, images: Sequence[StoredImage | None]) -> None:
        """Remove these images and all removable segments. Segments whose removal fails stay in the
        index, so that none after them is removed first."""
        with self._wake:
            removable = self._index.removable()
        for segment in removable:
            (self._config.directory / segment.file).unlink(missing_ok=True)
        with self._wake:
            self._index.discard(removable)
        self._images.remove([kept for kept in images if kept is not None])

    def _fail(self, error: OSError, batch: Sequence[_Waiting]) -> None:
        failure = _disk_failure(self._config.directory, error)
        with self._wake:
            is_new, self._failure = self._failure is None, failure
            waiting = [*batch, *self._queue]
        if is_new:
            log.error("journal_failed", reason=str(failure))
        for each in waiting:
            if not each.done.done():
                each.done.set_exception(failure)

    def _clear_failure(self) -> None:
        with self._wake:
            was_failing, self._failure = self._failure is not None, None
        if was_failing:
            log.info("journal_writes_resumed")


def _write_all(file: FileIO, data: bytes) -> None:
    """Write all data: an unbuffered file may write only a part per call."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _num_bytes(entry: JournalEntry) -> int:
    return ENTRY_BYTES + (0 if entry.record is None else entry.record.num_bytes)


def _disk_failure(directory: Path, error: Exception, *, fix: str = "") -> ShoalError:
    """The error of durable pushes. `fix`: its advice, by default that durable pushes go on once the
    disk works again."""
    if _errno(error) in _DISK_FULL_ERRNOS:
        return DiskFull(
            "the disk of the journal is full",
            seen=str(error),
            expected=f"free space at {directory}",
            fix=fix
            or "Free space there: pushes are acknowledged as durable again within seconds, "
            "and nothing has to be restarted. Other pushes go on meanwhile.",
        )
    return Unavailable(
        "the journal cannot be written",
        seen=str(error),
        expected=f"a disk at {directory} that works",
        fix=fix
        or "Writing is tried again twice a second. Push with another level than durable meanwhile.",
    )


def _errno(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError):
            return error.errno
        error = error.__cause__
    return None


def open_lock_file(path: Path) -> BinaryIO:
    """Open the lock file, and lock it until it is closed. Raises AddressInUse if another process
    has locked it."""
    # Append mode would not do: the text is overwritten in place.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise AddressInUse(
            f"another server keeps its journal in {path.parent}",
            seen=str(error),
            expected="a different directory for each server",
        ) from error
    return file
