"""Recovery of shards from a journal."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from shoal_proto.errors import JournalDamaged, MalformedMessage, ShoalError
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.journal.config import START_BYTES
from shoal_server.parameters.journal.images import JournalImages, StoredImage
from shoal_server.parameters.journal.index import EntryLocation, JournalIndex, JournalSegment
from shoal_server.parameters.journal.segment_format import JournalEntry, scan
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.snapshots.storage import sync_folder

log = structlog.get_logger(__name__)

State = TypeVar("State", bound=AnyShard)


@dataclass(kw_only=True)
class RecoveredShard(Generic[State]):
    job: str
    epoch: int
    state: State
    num_replayed: int = 0
    placement_id: str = ""
    """`JobAssignments.placement_id`; empty: unknown."""

    def is_of_another_placement(self, placement_id: str) -> bool:
        """True if both placements are known and differ."""
        return bool(self.placement_id and placement_id and self.placement_id != placement_id)


def read_index(directory: Path, images: JournalImages) -> tuple[JournalIndex, int]:
    """Read a journal's directory, cut off a torn end of the log, and remove superfluous images.
    Return the index and the next log number.

    Raises JournalDamaged, naming the file, for other damage of the log; Unavailable or OSError if
    the disk fails. Images are not read.
    """
    index, number = JournalIndex(), 1
    paths = sorted(directory.glob("segment-*.log"))
    for path in paths:
        data = path.read_bytes()
        content = scan(data, path.name, is_last=path == paths[-1])
        if content.num_bytes < max(len(data), START_BYTES):
            _cut(path, content.num_bytes, len(data))
        if content.num_bytes < START_BYTES:
            continue
        if index.segments and content.first_number != number:
            raise _gap(path.name, f"entry {content.first_number}", f"entry {number}")
        segment = JournalSegment(int(path.stem[8:]), content.first_number, content.num_bytes)
        index.segments.append(segment)
        number = content.first_number
        for number, entry in content.entries:
            index.note(number, entry)
        number = content.first_number + len(content.entries)
    superfluous = [index.put(kept) for kept in images.list()]
    images.remove([kept for kept in superfluous if kept is not None])
    return index, number


def replay(
    directory: Path,
    images: JournalImages,
    index: JournalIndex,
    make: Callable[[LoadedImage], State],
) -> Sequence[RecoveredShard[State]]:
    """Make each shard from its image, and apply later records. Raises what `Journal.recover`
    does."""
    recovered = {key: _made(images, kept, make) for key, kept in index.images.items()}
    for file, number, entry in _entries(directory, index.segments):
        key, record = entry.key, entry.record
        if record is None or not index.is_needed(
            key, EntryLocation(number, entry.epoch, record.version)
        ):
            continue
        shard = recovered.get(key)
        if shard is None or record.version != shard.state.version + 1:
            raise _gap(
                file,
                f"version {record.version} of shard {key[1]}, job {key[0]}",
                "its image" if shard is None else f"version {shard.state.version + 1}",
            )
        try:
            shard.state.replay(record)
        except (ShoalError, ValueError, RuntimeError) as error:
            raise _foreign(file, f"version {record.version}: {error}") from error
        shard.epoch = entry.epoch
        shard.num_replayed += 1
    return list(recovered.values())


def _made(
    images: JournalImages, kept: StoredImage, make: Callable[[LoadedImage], State]
) -> RecoveredShard[State]:
    image = images.read(kept)
    try:
        return RecoveredShard(
            job=kept.job, epoch=kept.epoch, state=make(image), placement_id=image.placement_id
        )
    except MalformedMessage as error:
        raise _foreign(kept.path, error.seen) from error


def _foreign(file: str, seen: str) -> JournalDamaged:
    return JournalDamaged(
        f"the journal's file {file} has the right checksum, but cannot be applied",
        seen=seen[:300],
        expected="records as this release of Shoal writes them",
        fix="Restore a snapshot, or start the server with an empty --journal.",
    )


def _entries(
    directory: Path, segments: Sequence[JournalSegment]
) -> Iterator[tuple[str, int, JournalEntry]]:
    for segment in segments:
        with (directory / segment.file).open("rb") as file:
            # Up to here everything is synced; the writer may be writing more.
            data = file.read(segment.num_bytes)
        for number, entry in scan(data, segment.file, is_last=False).entries:
            yield segment.file, number, entry


def _cut(path: Path, num_bytes: int, seen_bytes: int) -> None:
    """Cut off the torn end of the log, whose entries were never acknowledged as durable."""
    log.warning(
        "journal_tail_cut",
        file=path.name,
        num_bytes=seen_bytes - num_bytes,
        reason="the last write was cut off, as by a crash",
    )
    if num_bytes < START_BYTES:
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(num_bytes)
            os.fsync(file.fileno())
    sync_folder(path.parent)


def _gap(file: str, seen: str, expected: str) -> JournalDamaged:
    return JournalDamaged(
        f"records are missing in the journal, in {file} or before it",
        seen=seen,
        expected=expected,
        fix="Restore from a snapshot; an older copy of the journal lacks later pushes.",
        details={"file": file},
    )
