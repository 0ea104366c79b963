"""Decided generations as stored in etcd, one value each.

The value is JSON, readable with etcdctl except for `packed_roster`: a StoredRoster message,
deflated and in base64. A roster of 10,000 members takes 0.6 MB.
"""

import json
import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping

from google.protobuf.json_format import MessageToDict, ParseDict

from shoal_proto.deflated import pack, unpack
from shoal_proto.errors import MalformedMessage
from shoal_proto.names import is_name
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.persistence.codec import record_from_pb, record_to_pb, roster_to_pb
from shoal_server.coordinator.persistence.records import MAX_ENTRIES, MAX_RECORDS
from shoal_server.core.generations.roster import GenerationRecord, GenerationRoster, Verdict
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, Operation
from shoal_server.etcd.json_fields import MAX_COUNT, UnreadableRecord, as_unreadable, check_format

MAX_VALUE_BYTES = 1_400_000
"""Below the 1.5 MiB of a request, which has other writes, too."""
ROSTER = "packed_roster"


def record_to_json(record: GenerationRecord) -> bytes:
    """Encode the record for etcd."""
    value = MessageToDict(record_to_pb(record, with_roster=False), preserving_proto_field_name=True)
    incarnations = [entry.incarnation for entry in record.roster.entries]
    stored = pb.StoredRoster(roster=roster_to_pb(record.roster), incarnations=incarnations)
    return json.dumps({**value, ROSTER: b64encode(pack(stored)).decode()}).encode()


def stored_record(job: str, number: int, data: bytes) -> GenerationRecord:
    """Decode the stored record of this generation of the job. Raises UnreadableRecord."""
    with as_unreadable():
        record = _record_from_json(json.loads(data))
    if record.job != job or record.roster.generation != number:
        raise UnreadableRecord(
            f"a record of generation {record.roster.generation} of job {record.job[:128]!r};"
            f" expected generation {number} of {job!r}"
        )
    entries = record.roster.entries
    if sorted(e.rank for e in entries) != list(range(len(entries))):
        raise UnreadableRecord(f"ranks that are not 0 to {len(entries) - 1}")
    if len({e.member_id for e in entries}) < len(entries) or not all(
        is_name(e.member_id) and e.incarnation for e in entries
    ):
        raise UnreadableRecord("members without a name or incarnation, or the same member twice")
    if not math.isfinite(record.decided_s) or record.roster.step > MAX_COUNT:
        raise UnreadableRecord(f"decided at {record.decided_s}, at step {record.roster.step}")
    return record


def _record_from_json(value: Mapping[str, object]) -> GenerationRecord:
    check_format(value)
    packed = value[ROSTER]
    if not isinstance(packed, str):
        raise UnreadableRecord(f"{ROSTER} is not a string")
    try:
        stored = unpack(pb.StoredRoster, b64decode(packed, validate=True))
    except MalformedMessage as error:
        raise UnreadableRecord(str(error)) from error
    rest = {name: each for name, each in value.items() if name != ROSTER}
    message = ParseDict(rest, pb.GenerationRecord(), ignore_unknown_fields=True)
    if message.roster.generation != stored.roster.generation:
        raise UnreadableRecord(
            f"a roster of generation {stored.roster.generation};"
            f" expected generation {message.roster.generation}"
        )
    message.roster.CopyFrom(stored.roster)
    names = [entry.member_id for entry in stored.roster.entries]
    return record_from_pb(message, dict(zip(names, stored.incarnations, strict=True)))


def size_problem(roster: GenerationRoster) -> str:
    """Reason why etcd could not keep this roster's record; empty if it can. Checked before members
    see the roster."""
    decided = GenerationRecord(
        job="", roster=roster, verdict=Verdict.COMMITTED, reason="", digest="", decided_s=0.0
    )
    size = len(record_to_json(decided))
    if size <= MAX_VALUE_BYTES:
        return ""
    return f"{size} bytes in one value; etcd is given at most {MAX_VALUE_BYTES}"


class StoredGenerations:
    """Numbers of a job's decided generations in etcd."""

    def __init__(self, records: Iterable[GenerationRecord] = (), older: Iterable[int] = ()) -> None:
        """`records`: the newest, in order. `older`: numbers of the others, which the next `decided`
        deletes."""
        self._kept = {record.roster.generation: _weight(record) for record in records}
        self._older = list(older)

    def decided(self, record: GenerationRecord) -> list[Operation]:
        """Note a durable record, and return the due deletions.

        Keeps the newest records within the bounds of `Records`, and the newest two committed ones.
        """
        # A committed generation whose bring-up fails is decided again, as aborted, and moves to the
        # end.
        self._kept.pop(record.roster.generation, None)
        self._kept[record.roster.generation] = _weight(record)
        needed: set[int] = set()
        num_entries = 0
        for number in reversed(self._kept):
            if len(needed) == MAX_RECORDS or num_entries >= MAX_ENTRIES:
                break
            needed.add(number)
            num_entries += self._kept[number][1]
        needed.update([number for number, (committed, _) in self._kept.items() if committed][-2:])
        outdated = [*self._older, *(self._kept.keys() - needed)]
        self._older = []
        self._kept = {number: each for number, each in self._kept.items() if number in needed}
        return [Delete(keys.generation(record.job, number)) for number in outdated]


def _weight(record: GenerationRecord) -> tuple[bool, int]:
    return record.verdict is Verdict.COMMITTED, len(record.roster.entries)
