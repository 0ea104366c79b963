"""The core's types as messages and as records in etcd, and back."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import Enum

from google.protobuf.json_format import MessageToDict, ParseDict

from shoal_proto import errors, secrets
from shoal_proto.digest import roster_digest
from shoal_proto.errors import InternalError, ShoalError
from shoal_proto.incarnation import public_id
from shoal_proto.names import is_name
from shoal_proto.packing import roster_chunks
from shoal_proto.packing.listings import PackedListing
from shoal_proto.packing.roster_chunks import CutRoster, cut
from shoal_proto.status import to_detail
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.core.generations.roster import (
    Conflict,
    Generation,
    JobSpec,
    MemberInfo,
    Proposal,
    Record,
    Roster,
    RosterEntry,
    StateAction,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.etcd.json_fields import MAX_COUNT, Fields, Unreadable, check_format, taken_apart

MAX_PORT = 65535

_STATE_TO_PB = {
    StateAction.INITIAL: pb.STATE_ACTION_INITIAL,
    StateAction.KEEP: pb.STATE_ACTION_KEEP,
    StateAction.RECEIVE: pb.STATE_ACTION_RECEIVE,
    StateAction.CHECKPOINT: pb.STATE_ACTION_CHECKPOINT,
}
_STATE_FROM_PB = {value: key for key, value in _STATE_TO_PB.items()}
_VERDICT_TO_PB = {
    Verdict.COMMITTED: pb.VERDICT_COMMITTED,
    Verdict.ABORTED: pb.VERDICT_ABORTED,
}
_VERDICT_FROM_PB = {value: key for key, value in _VERDICT_TO_PB.items()}


def spec_from_pb(spec: pb.JobSpec, secret: str) -> JobSpec:
    """The bounds as a member states them, whose token has this secret of the job."""
    return JobSpec(
        job=spec.job,
        min_members=spec.min_members,
        max_members=spec.max_members,
        desired_members=spec.desired_members,
        last_call_s=spec.last_call_s,
        secret_digest=secrets.digest_of(secret),
    )


def info_from_pb(info: pb.MemberInfo) -> MemberInfo:
    """As a member states it."""
    return MemberInfo(**{each.name: getattr(info, each.name) for each in fields(MemberInfo)})


def proposal_from_pb(proposal: pb.Proposal) -> Proposal:
    return Proposal(
        fields=dict(proposal.fields),
        synchronous=proposal.synchronous,
        step=Step(proposal.step),
        has_state=proposal.has_state,
        stateless=proposal.stateless,
        optional_fields=dict(proposal.optional_fields),
        listings={name: PackedListing(each) for name, each in proposal.listings.items()},
    )


def limits_to_pb(limits: Limits) -> pb.Limits:
    told = pb.Limits.DESCRIPTOR.fields_by_name
    return pb.Limits(
        **{each.name: getattr(limits, each.name) for each in fields(limits) if each.name in told}
    )


class RosterForm(Enum):
    """How a message names the members of a generation."""

    WHOLE = "whole"
    HEAD = "head"
    """By the digests of chunks, which are to be had elsewhere."""
    LEFT_OUT = "left out"
    """Not at all: only the number of the generation."""


def is_large(roster: Roster) -> bool:
    """Whether it is kept and told in chunks."""
    return len(roster.entries) > roster_chunks.CHUNK_ENTRIES


_newest_roster: list[tuple[Roster, pb.Roster]] = []
_newest_cut: list[tuple[Roster, CutRoster]] = []


def cut_of(roster: Roster) -> CutRoster:
    """The roster in chunks, which are shared: do not change them."""
    if not _newest_cut or _newest_cut[0][0] is not roster:
        _newest_cut[:] = [(roster, cut(roster_to_pb(roster)))]
    return _newest_cut[0][1]


def roster_to_pb(roster: Roster) -> pb.Roster:
    """The roster as a message, which is shared: do not change it."""
    # Digest, Prepare, record in etcd and Outcome follow one upon the other, all of one roster.
    if not _newest_roster or _newest_roster[0][0] is not roster:
        _newest_roster[:] = [(roster, _roster_to_pb(roster))]
    return _newest_roster[0][1]


def _roster_to_pb(roster: Roster) -> pb.Roster:
    entries = [
        pb.RosterEntry(
            member_id=e.member_id,
            public_id=public_id(e.incarnation),
            rank=e.rank,
            host=e.host,
            address=e.address,
            state=_STATE_TO_PB[e.state],
            step=e.step,
            probe_port=e.probe_port,
        )
        for e in roster.entries
    ]
    return pb.Roster(
        generation=roster.generation,
        entries=entries,
        source_member_id=roster.source_member_id,
        step=roster.step,
        planned=roster.planned,
        synchronous=roster.synchronous,
        fields=roster.fields,
        step_messages=roster.step_messages,
    )


def roster_from_pb(roster: pb.Roster, incarnations: Mapping[str, str]) -> Roster:
    """`incarnations`: by member id; a message does not have them."""
    entries = tuple(
        RosterEntry(
            member_id=e.member_id,
            incarnation=incarnations[e.member_id],
            rank=e.rank,
            host=e.host,
            address=e.address,
            state=_STATE_FROM_PB[e.state],
            step=Step(e.step),
            probe_port=e.probe_port,
        )
        for e in roster.entries
    )
    return Roster(
        generation=Generation(roster.generation),
        entries=entries,
        source_member_id=roster.source_member_id,
        step=Step(roster.step),
        planned=roster.planned,
        synchronous=roster.synchronous,
        fields=dict(roster.fields),
        step_messages=roster.step_messages,
    )


def digest_of(roster: Roster) -> str:
    return roster_digest(roster_to_pb(roster))


def record_to_pb(record: Record, form: RosterForm = RosterForm.WHOLE) -> pb.GenerationRecord:
    """Whatever is left out of its roster, a record has the number of its generation."""
    roster = record.roster
    conflicts = [
        pb.Conflict(
            field=c.field,
            values=[pb.ConflictingValue(value=value, member_ids=who) for value, who in c.values],
        )
        for c in record.conflicts
    ]
    return pb.GenerationRecord(
        job=record.job,
        roster=_in_form(roster, form),
        head=cut_of(roster).head if form is RosterForm.HEAD else None,
        verdict=_VERDICT_TO_PB[record.verdict],
        reason=record.reason,
        digest=record.digest,
        conflicts=conflicts,
        decided_unix_s=record.decided_s,
    )


def _in_form(roster: Roster, form: RosterForm) -> pb.Roster:
    if form is RosterForm.WHOLE:
        return roster_to_pb(roster)
    return pb.Roster(generation=roster.generation)


def stored_record(job: str, number: int, data: bytes) -> Record:
    """The decided record that lies at the key of that generation of the job. Raises Unreadable."""
    with taken_apart():
        record = record_from_json(data)
    return checked_record(job, number, record)


def checked_record(job: str, number: int, record: Record) -> Record:
    """The record, which lay at the key of that generation of the job. Raises Unreadable."""
    if record.job != job or record.roster.generation != number:
        raise Unreadable(
            f"a record of generation {record.roster.generation} of job {record.job[:128]!r};"
            f" expected generation {number} of {job!r}"
        )
    entries = record.roster.entries
    if sorted(e.rank for e in entries) != list(range(len(entries))):
        raise Unreadable(f"ranks that are not 0 to {len(entries) - 1}")
    if len({e.member_id for e in entries}) < len(entries) or not all(
        is_name(e.member_id) and e.incarnation for e in entries
    ):
        raise Unreadable("members without a name or incarnation, or twice the same")
    if not math.isfinite(record.decided_s) or record.roster.step > MAX_COUNT:
        raise Unreadable(f"decided at {record.decided_s}, at step {record.roster.step}")
    return record


def record_from_pb(record: pb.GenerationRecord, incarnations: Mapping[str, str]) -> Record:
    conflicts = tuple(
        Conflict(field=c.field, values=tuple((v.value, tuple(v.member_ids)) for v in c.values))
        for c in record.conflicts
    )
    return Record(
        job=record.job,
        roster=roster_from_pb(record.roster, incarnations),
        verdict=_VERDICT_FROM_PB[record.verdict],
        reason=record.reason,
        digest=record.digest,
        decided_s=record.decided_unix_s,
        conflicts=conflicts,
    )


def record_to_json(record: Record) -> bytes:
    """The record as it lies in etcd: JSON, so that a person can read it with etcdctl.

    Beside the message, which members see, are the incarnations, which they do not.
    """
    value = MessageToDict(record_to_pb(record), preserving_proto_field_name=True)
    incarnations = {entry.member_id: entry.incarnation for entry in record.roster.entries}
    return json.dumps({**value, "incarnations": incarnations}).encode()


def record_from_json(data: bytes) -> Record:
    """What `record_to_json` wrote. Raises whatever the bytes give rise to: see `stored_record`."""
    value = json.loads(data)
    check_format(value)
    message = ParseDict(value, pb.GenerationRecord(), ignore_unknown_fields=True)
    incarnations = value["incarnations"]
    if not all(isinstance(each, str) for each in incarnations.values()):
        raise Unreadable("incarnations that are no strings")
    return record_from_pb(message, incarnations)


def member_to_json(incarnation: str, info: MemberInfo) -> bytes:
    return json.dumps({"incarnation": incarnation, **asdict(info)}).encode()


def member_from_json(data: bytes) -> tuple[str, MemberInfo]:
    """Incarnation and info of a member's key. Raises Unreadable."""
    value = Fields.parsed(data)
    info = MemberInfo(
        host=value.text("host"),
        pid=value.count("pid"),
        address=value.text("address"),
        device=value.text("device"),
        torch_version=value.text("torch_version"),
        shoal_version=value.text("shoal_version"),
        num_devices=value.count("num_devices", 0),
        probe_port=value.count("probe_port", 0, most=MAX_PORT),
        launch_digest=value.text("launch_digest", ""),
        step_messages=value.count("step_messages", 0),
    )
    incarnation = value.text("incarnation")
    if not incarnation:
        raise Unreadable("incarnation is empty; expected a UUID")
    return incarnation, info


def refusal_to_error(refusal: events.Refusal, generation: int) -> ShoalError:
    """The error class a refusal names, with the conflicts and current generation as details."""
    kind = getattr(errors, refusal.kind, InternalError)
    details = {c.field: str(c) for c in refusal.conflicts}
    details["generation"] = str(generation)
    if refusal.replaced_by:
        details["replaced_by"] = public_id(refusal.replaced_by)
    error: ShoalError = kind(
        refusal.what,
        seen=refusal.seen,
        expected=refusal.expected,
        fix=refusal.fix,
        details=details,
    )
    return error


def notice_to_pb(
    notice: events.Notice, generation: int, form: RosterForm = RosterForm.WHOLE
) -> pb.Notice:
    """`generation` is the job's newest, for the details of a refusal.

    An outcome of which the roster is left out is meant for a member that holds it already.
    """
    message = pb.Notice(reason=notice.reason)
    match notice:
        case events.PrepareNotice():
            message.prepare.CopyFrom(
                pb.Prepare(
                    roster=_in_form(notice.roster, form),
                    digest=notice.digest,
                    head=cut_of(notice.roster).head if form is RosterForm.HEAD else None,
                )
            )
        case events.OutcomeNotice():
            message.outcome.CopyFrom(record_to_pb(notice.record, form))
        case events.StopAtNotice():
            message.stop_at.CopyFrom(pb.StopAt(generation=notice.generation, step=notice.step))
        case events.BreakNotice():
            lost = notice.lost_member_ids
            getattr(message, "break").CopyFrom(
                pb.Break(generation=notice.generation, lost_member_ids=lost)
            )
        case events.RunningNotice():
            message.running.CopyFrom(pb.Running(generation=notice.generation))
        case events.StandbyNotice():
            message.standby.CopyFrom(pb.Standby(position=notice.position))
        case events.PausesNotice():
            message.pauses.CopyFrom(pb.Pauses(member_ids=notice.member_ids))
        case events.ClosingNotice():
            message.closing.SetInParent()
        case events.WaitingNotice():
            message.waiting.CopyFrom(pb.Waiting(num_members=notice.num_members))
        case events.DrainNotice():
            message.drain.CopyFrom(pb.Drain(now=notice.now, unreplaced=notice.unreplaced))
        case events.RefusedNotice():
            message.refused.CopyFrom(to_detail(refusal_to_error(notice.refusal, generation)))
        case _:
            raise AssertionError(f"no message for {notice}")
    return message
