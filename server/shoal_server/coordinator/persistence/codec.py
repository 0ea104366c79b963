"""Conversion of the core's types to and from messages and records in etcd."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields

from shoal_proto import secrets
from shoal_proto.errors import InternalError, ShoalError
from shoal_proto.incarnation import public_id
from shoal_proto.listings import PackedListing
from shoal_proto.rosters import roster_digest
from shoal_proto.status import to_detail
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.core.generations.roster import (
    Conflict,
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    MemberInfo,
    Proposal,
    RosterEntry,
    StateAction,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.etcd.json_fields import Fields, UnreadableRecord

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
    """Return the bounds that a member sent, unchecked, with the digest of `secret`."""
    return JobSpec(
        job=spec.job,
        min_members=spec.min_members,
        max_members=spec.max_members,
        desired_members=spec.desired_members,
        last_call_s=spec.last_call_s,
        secret_digest=secrets.digest_of(secret),
    )


def info_from_pb(info: pb.MemberInfo) -> MemberInfo:
    """Return the info that a member sent about itself, unchecked."""
    return MemberInfo(**{each.name: getattr(info, each.name) for each in fields(MemberInfo)})


def proposal_from_pb(proposal: pb.Proposal) -> Proposal:
    """Return the proposal that a member sent. Its listings stay packed."""
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
    """Return the limits that members need."""
    return pb.Limits(
        heartbeat_s=limits.heartbeat_s,
        lease_s=limits.lease_s,
        prepare_s=limits.prepare_s,
        bring_up_s=limits.bring_up_s,
        collective_s=limits.collective_s,
        watchdog_s=limits.watchdog_s,
        join_s=limits.join_s,
        probe_s=limits.probe_s,
        drain_s=limits.drain_s,
    )


_newest_roster: list[tuple[GenerationRoster, pb.Roster]] = []


def roster_to_pb(roster: GenerationRoster) -> pb.Roster:
    """The roster as a shared message: do not change it."""
    # Digest, Prepare, record and Outcome are made from the same roster in turn.
    if not _newest_roster or _newest_roster[0][0] is not roster:
        _newest_roster[:] = [(roster, _roster_to_pb(roster))]
    return _newest_roster[0][1]


def _roster_to_pb(roster: GenerationRoster) -> pb.Roster:
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
    )


def roster_from_pb(roster: pb.Roster, incarnations: Mapping[str, str]) -> GenerationRoster:
    """Return the roster in a message, with these incarnations by member id. Raises KeyError for a
    missing incarnation or an unknown StateAction."""
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
    return GenerationRoster(
        generation=Generation(roster.generation),
        entries=entries,
        source_member_id=roster.source_member_id,
        step=Step(roster.step),
        planned=roster.planned,
        synchronous=roster.synchronous,
        fields=dict(roster.fields),
    )


def digest_of(roster: GenerationRoster) -> str:
    """Return the digest by which members accept the roster."""
    return roster_digest(roster_to_pb(roster))


def record_to_pb(record: GenerationRecord, *, with_roster: bool = True) -> pb.GenerationRecord:
    """The record as a message; without its roster, with the generation number."""
    conflicts = [
        pb.Conflict(
            field=c.field,
            values=[pb.ConflictingValue(value=value, member_ids=who) for value, who in c.values],
        )
        for c in record.conflicts
    ]
    return pb.GenerationRecord(
        job=record.job,
        roster=_roster_or_number(record.roster, with_roster),
        verdict=_VERDICT_TO_PB[record.verdict],
        reason=record.reason,
        digest=record.digest,
        conflicts=conflicts,
        decided_unix_s=record.decided_s,
    )


def _roster_or_number(roster: GenerationRoster, with_roster: bool) -> pb.Roster:
    return roster_to_pb(roster) if with_roster else pb.Roster(generation=roster.generation)


def record_from_pb(
    record: pb.GenerationRecord, incarnations: Mapping[str, str]
) -> GenerationRecord:
    """Return the record in a message. Raises what `roster_from_pb` raises, and KeyError for an
    unknown verdict."""
    conflicts = tuple(
        Conflict(field=c.field, values=tuple((v.value, tuple(v.member_ids)) for v in c.values))
        for c in record.conflicts
    )
    return GenerationRecord(
        job=record.job,
        roster=roster_from_pb(record.roster, incarnations),
        verdict=_VERDICT_FROM_PB[record.verdict],
        reason=record.reason,
        digest=record.digest,
        decided_s=record.decided_unix_s,
        conflicts=conflicts,
    )


def member_to_json(incarnation: str, info: MemberInfo) -> bytes:
    return json.dumps({"incarnation": incarnation, **asdict(info)}).encode()


def member_from_json(data: bytes) -> tuple[str, MemberInfo]:
    """Decode a member's incarnation and info. Raises UnreadableRecord."""
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
    )
    incarnation = value.text("incarnation")
    if not incarnation:
        raise UnreadableRecord("incarnation is empty; expected a UUID")
    return incarnation, info


def refusal_to_error(refusal: events.Refusal, generation: int) -> ShoalError:
    """Error of the class that the refusal names; InternalError for an unknown one."""
    kind = ShoalError.kinds.get(refusal.kind, InternalError)
    details = {c.field: str(c) for c in refusal.conflicts}
    details["generation"] = str(generation)
    if refusal.replaced_by:
        details["replaced_by"] = public_id(refusal.replaced_by)
    return kind(
        refusal.what,
        seen=refusal.seen,
        expected=refusal.expected,
        fix=refusal.fix,
        details=details,
    )


def notice_to_pb(notice: events.Notice, generation: int, *, with_roster: bool = True) -> pb.Notice:
    """The notice as a message. `generation`: the job's newest, for a refusal's details."""
    message = pb.Notice(reason=notice.reason)
    match notice:
        case events.PrepareNotice():
            message.prepare.CopyFrom(
                pb.Prepare(
                    roster=_roster_or_number(notice.roster, with_roster), digest=notice.digest
                )
            )
        case events.OutcomeNotice():
            message.outcome.CopyFrom(record_to_pb(notice.record, with_roster=with_roster))
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
            message.drain.CopyFrom(
                pb.Drain(now=notice.now, unreplaced=notice.no_generation_follows)
            )
        case events.RefusedNotice():
            message.refused.CopyFrom(to_detail(refusal_to_error(notice.refusal, generation)))
        case _:
            raise AssertionError(f"no message for {notice}")
    return message
