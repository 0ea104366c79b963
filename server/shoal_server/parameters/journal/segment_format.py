"""The format of a journal's segment: entries in sequence, each with a checksum.

    segment   16 bytes: magic, log number of its first entry
    entry     head: magic, bytes of the header, bytes of the data, log number,
                    bytes of this segment that were synced when the entry was written
              CRC-32 of head, header and data
              header: a RecordStart without `num_bytes`; without `record`, it ends the shard in
                      this journal
              data

After a crash, any part of the last write may be on disk: a torn end. The counts of synced bytes
distinguish a torn end from damage: synced bytes must be intact.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from shoal_proto.checksum import crc32
from shoal_proto.errors import JournalDamaged
from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import RecordStart
from shoal_server.parameters.journal.config import START_BYTES
from shoal_server.parameters.shard.record import UpdateRecord

SEGMENT_MAGIC = b"SHOALJ1\n"
ENTRY_MAGIC = b"\xf5SJ1"
_START = struct.Struct("<8sQ")
_HEAD = struct.Struct("<4sIIQQ")
_CRC = struct.Struct("<I")
assert _START.size == START_BYTES
HEAD_BYTES = _HEAD.size + _CRC.size


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A push as it was applied, or without a record the end of a shard in this journal."""

    job: str
    shard_id: int
    epoch: int
    record: UpdateRecord | None

    @property
    def key(self) -> tuple[str, int]:
        return self.job, self.shard_id


@dataclass(frozen=True, slots=True)
class SegmentScan:
    first_number: int
    entries: tuple[tuple[int, JournalEntry], ...]
    """Entries with their log numbers."""
    num_bytes: int
    """Size up to the last complete entry. Nothing follows, or a torn end."""


def start(first_number: int) -> bytes:
    return _START.pack(SEGMENT_MAGIC, first_number)


def encode(entry: JournalEntry, number: int, synced_bytes: int) -> bytes:
    header = RecordStart(job=entry.job, shard_id=entry.shard_id, epoch=entry.epoch)
    data: Buffer = b""
    if entry.record is not None:
        header.record.CopyFrom(entry.record.push)
        data = entry.record.data
    text = header.SerializeToString()
    head = _HEAD.pack(ENTRY_MAGIC, len(text), len(data), number, synced_bytes)
    crc = crc32(data, crc32(text, crc32(head)))
    return b"".join((head, _CRC.pack(crc), text, data))


def scan(data: bytes, file: str, *, is_last: bool) -> SegmentScan:
    """Read entries up to the first incomplete one.

    Raises JournalDamaged, naming the file, if the incomplete entry had been synced. In the last
    segment, a later entry proves the sync; earlier segments were synced completely.
    """
    if len(data) < START_BYTES or data[:8] != SEGMENT_MAGIC:
        _check_torn(data, 0, file, is_last=is_last)
        return SegmentScan(0, (), 0)
    _, number = _START.unpack_from(data)
    first_number, at = number, START_BYTES
    entries: list[tuple[int, JournalEntry]] = []
    while at < len(data):
        parsed = _entry_at(data, at)
        if parsed is None or parsed.number != number:
            _check_torn(data, at, file, is_last=is_last)
            break
        entries.append((number, parsed.entry()))
        number += 1
        at = parsed.stop
    return SegmentScan(first_number, tuple(entries), at)


@dataclass(frozen=True, slots=True)
class _ParsedEntry:
    number: int
    synced_bytes: int
    stop: int
    header: RecordStart
    data: bytes

    def entry(self) -> JournalEntry:
        header = self.header
        record = UpdateRecord(header.record, self.data) if header.HasField("record") else None
        return JournalEntry(header.job, header.shard_id, header.epoch, record)


def _entry_at(data: bytes, at: int) -> _ParsedEntry | None:
    """The entry that begins at `at`; None if it is missing or incomplete."""
    body = at + HEAD_BYTES
    if body > len(data):
        return None
    magic, num_header, num_data, number, synced_bytes = _HEAD.unpack_from(data, at)
    stop = body + num_header + num_data
    if magic != ENTRY_MAGIC or stop > len(data):
        return None
    (expected,) = _CRC.unpack_from(data, at + _HEAD.size)
    view = memoryview(data)
    if crc32(view[body:stop], crc32(view[at : at + _HEAD.size])) != expected:
        return None
    try:
        header = RecordStart.FromString(data[body : body + num_header])
    except DecodeError:
        return None
    return _ParsedEntry(number, synced_bytes, stop, header, data[body + num_header : stop])


def _check_torn(data: bytes, at: int, file: str, *, is_last: bool) -> None:
    """Raise JournalDamaged unless the bytes from `at` on may be the journal's torn end."""
    witness = None if not is_last else _witness(data, at)
    if is_last and witness is None:
        return
    raise JournalDamaged(
        f"the journal {file} is damaged",
        seen=f"no whole entry at byte {at} of {len(data)}",
        expected="an entry that had certainly been synced to disk"
        + (f", as the entry at byte {witness} shows" if witness is not None else ""),
        fix="Restore from a snapshot; an older copy of the journal lacks later pushes.",
        details={"file": file, "offset": str(at)},
    )


def _witness(data: bytes, at: int) -> int | None:
    """Start of a later entry that proves the sync of the byte at `at`, or None."""
    for offset in _offsets(data, at + 1):
        parsed = _entry_at(data, offset)
        if parsed is not None and parsed.synced_bytes > at:
            return offset
    return None


def _offsets(data: bytes, at: int) -> Iterator[int]:
    offset = data.find(ENTRY_MAGIC, at)
    while offset >= 0:
        yield offset
        offset = data.find(ENTRY_MAGIC, offset + 1)
