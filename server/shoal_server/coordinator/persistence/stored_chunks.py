"""Generations of many members in etcd: a small decided record, and chunks that it names by digest.

The chunks are written before the record that decides, each once: those of one generation are for
the most part those of the one before. What no kept record names any more is deleted.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from shoal_proto.errors import MalformedMessage
from shoal_proto.packing import roster_chunks
from shoal_proto.packing.roster_chunks import assembled, digests, put, taken
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.records import MAX_RECORDS
from shoal_server.core.generations.roster import Record, Verdict
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, KeyValue, Operation, Put
from shoal_server.etcd.json_fields import Fields, Unreadable, taken_apart

log = structlog.get_logger(__name__)

FORMAT = 2
"""A release that knows no chunks leaves these records alone."""
_BEGINNING = b'{"format": 2, "generation": '
KEPT_RECORDS = 8
"""Of many members. The newest two that were committed are always among those kept."""


@dataclass(frozen=True, kw_only=True)
class ToStore:
    """A decided record on its way to etcd."""

    value: bytes
    """Of the generation's own key."""
    chunks: Mapping[bytes, bytes]
    """What the value names, by digest."""


_newest: list[tuple[Record, ToStore]] = []


def to_stored(record: Record) -> ToStore:
    """The record as it lies in etcd: as JSON, or in chunks if its members are many."""
    if not _newest or _newest[0][0] is not record:
        _newest[:] = [(record, _to_stored(record))]
    return _newest[0][1]


def _to_stored(record: Record) -> ToStore:
    if not codec.is_large(record.roster):
        return ToStore(value=codec.record_to_json(record), chunks={})
    chunks = dict(codec.cut_of(record.roster).chunks)
    message = pb.StoredGeneration(record=codec.record_to_pb(record, codec.RosterForm.HEAD))
    incarnations = [entry.incarnation for entry in record.roster.entries]
    size = roster_chunks.CHUNK_ENTRIES
    for start in range(0, len(incarnations), size):
        part = pb.IncarnationChunk(incarnations=incarnations[start : start + size])
        message.incarnation_digests.append(put(part, chunks))
    text = b64encode(message.SerializeToString(deterministic=True)).decode()
    return ToStore(value=_BEGINNING + json.dumps(text).encode() + b"}", chunks=chunks)


def in_chunks(data: bytes) -> pb.StoredGeneration | None:
    """What lies at a generation's key; None if it is a record that stands there whole.

    Raises Unreadable.
    """
    if not data.startswith(_BEGINNING):
        return None
    text = Fields.parsed(data, FORMAT).text("generation")
    try:
        return pb.StoredGeneration.FromString(b64decode(text, validate=True))
    except (DecodeError, ValueError) as error:
        raise Unreadable(f"generation holds no StoredGeneration ({error})") from error


def digests_of(stored: pb.StoredGeneration) -> list[bytes]:
    """Of all chunks that the record is made of."""
    return [*digests(stored.record.head), *stored.incarnation_digests]


def read(job: str, number: int, data: bytes, chunks: Mapping[bytes, bytes]) -> Record:
    """The record at that generation's key of the job, in whichever form. Raises Unreadable."""
    stored = in_chunks(data)
    if stored is None:
        return codec.stored_record(job, number, data)
    return from_stored(job, number, stored, chunks)


def chunks_in(job: str, items: Iterable[KeyValue]) -> dict[bytes, bytes]:
    """Those among the job's records in etcd, by digest."""
    prefix = keys.roster_chunks(job)
    found = {item.key: item.value for item in items if item.key.startswith(prefix)}
    return dict(zip(digests_in(job, found), found.values(), strict=True))


def digests_in(job: str, found: Iterable[str]) -> list[bytes]:
    """Of the chunks at these keys of the job."""
    prefix = keys.roster_chunks(job)
    return [_digest(key.removeprefix(prefix)) for key in found]


def _digest(name: str) -> bytes:
    try:
        return bytes.fromhex(name)
    except ValueError:
        log.warning("key_of_no_chunk", name=name)
        return b""


def from_stored(
    job: str, number: int, stored: pb.StoredGeneration, chunks: Mapping[bytes, bytes]
) -> Record:
    """The record at that generation's key of the job. Raises Unreadable."""
    if lacks := [digest.hex() for digest in digests_of(stored) if digest not in chunks]:
        raise Unreadable(f"{len(lacks)} chunks are missing, {keys.roster_chunks(job)}{lacks[0]}")
    try:
        roster = assembled(stored.record.head, chunks)
        incarnations = [
            incarnation
            for digest in stored.incarnation_digests
            for incarnation in taken(pb.IncarnationChunk, chunks[digest]).incarnations
        ]
    except MalformedMessage as error:
        raise Unreadable(str(error)) from error
    if len(incarnations) != len(roster.entries):
        raise Unreadable(f"{len(incarnations)} incarnations of {len(roster.entries)} members")
    whole = pb.GenerationRecord()
    whole.CopyFrom(stored.record)
    whole.ClearField("head")
    whole.roster.CopyFrom(roster)
    names = (entry.member_id for entry in roster.entries)
    with taken_apart():
        record = codec.record_from_pb(whole, dict(zip(names, incarnations, strict=True)))
    return codec.checked_record(job, number, record)


_NOTHING: frozenset[bytes] = frozenset()


class StoredChunks:
    """Which records of one job lie in etcd, and which chunks for them."""

    def __init__(
        self,
        present: Collection[bytes] = (),
        records: Iterable[tuple[int, pb.StoredGeneration]] = (),
        *,
        whole: Iterable[tuple[int, bool]] = (),
        older: Iterable[int] = (),
    ) -> None:
        """As they were found in etcd; `records` by their numbers. `whole`: numbers of those that
        are not in chunks, and whether they were committed. `older` are not kept any longer."""
        self._present = set(present)
        named = {
            number: (stored.record.verdict == pb.VERDICT_COMMITTED, frozenset(digests_of(stored)))
            for number, stored in records
        }
        unnamed = {number: (is_committed, _NOTHING) for number, is_committed in whole}
        self._kept = dict(sorted({**named, **unnamed}.items()))
        self._older = list(older)

    def missing(self, record: Record) -> list[Operation]:
        """What is to be written before the record."""
        return [
            Put(keys.roster_chunk(record.job, digest), chunk)
            for digest, chunk in to_stored(record).chunks.items()
            if digest not in self._present
        ]

    def decided(self, record: Record) -> list[Operation]:
        """The record is durable: what is to be deleted now, records and chunks that no kept one
        names."""
        named = _NOTHING
        if codec.is_large(record.roster):
            named = frozenset(to_stored(record).chunks)
        # An attempt that was committed may be aborted later: it stands last then, too.
        self._kept.pop(record.roster.generation, None)
        self._kept[record.roster.generation] = (record.verdict is Verdict.COMMITTED, named)
        self._present |= named
        outdated = [*self._older, *self._outdated()]
        self._older = []
        for number in outdated:
            self._kept.pop(number, None)
        operations: list[Operation] = [
            Delete(keys.generation(record.job, number)) for number in outdated
        ]
        unnamed = self._present.difference(*(of_it for _, of_it in self._kept.values()))
        self._present -= unnamed
        return operations + [Delete(keys.roster_chunk(record.job, each)) for each in unnamed]

    def _outdated(self) -> list[int]:
        committed = [number for number, (committed, _) in self._kept.items() if committed]
        large = [number for number, (_, named) in self._kept.items() if named]
        small = [number for number, (_, named) in self._kept.items() if not named]
        needed = {*large[-KEPT_RECORDS:], *small[-MAX_RECORDS:], *committed[-2:]}
        return [number for number in self._kept if number not in needed]
