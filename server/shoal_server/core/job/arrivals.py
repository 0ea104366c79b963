"""Members that join, reconnect or are disconnected."""

from uuid import UUID

from shoal_server.core.generations.ranges import device_problem
from shoal_server.core.generations.roster import NO_GENERATION, Generation
from shoal_server.core.job import draining, endings, pausing
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    AdmitMember,
    ClosingNotice,
    EventRefused,
    MemberEvent,
    MemberJoined,
    OutcomeNotice,
    Refusal,
    RunningNotice,
    StandbyNotice,
    WaitingNotice,
)
from shoal_server.core.membership.member import MemberState, Wait
from shoal_server.core.membership.phases import Phase
from shoal_server.core.membership.setbacks import MAX_TRIES


def require_member(job: JobState, event: MemberEvent) -> MemberState:
    """Return the member that sent the event. Raises EventRefused if its process is not a member."""
    member = job.members.get(event.member_id)
    if refusal := job.table.expelled.get(event.incarnation):
        # The process got a notice with this refusal.
        raise EventRefused(refusal)
    if member is None or member.incarnation != event.incarnation:
        raise EventRefused(_fenced(job, member, event))
    return member


def _fenced(job: JobState, holder: MemberState | None, event: MemberEvent) -> Refusal:
    if holder is None:
        return refusals.not_a_member(job.spec.job, event, job.last_generation)
    return refusals.replaced(event, holder.incarnation, job.last_generation)


def joined(job: JobState, event: MemberJoined, now_s: float) -> None:
    known = job.members.get(event.member_id)
    if known is not None and known.incarnation == event.incarnation:
        # Also while the job is completing: the member has work left.
        _reconnected(job, known, event.generation, now_s)
        return
    job.refuse_if_over()
    if problem := event.spec.problem():
        raise EventRefused(refusals.bad_spec(job.spec.job, problem))
    if problem := device_problem(event.info):
        raise EventRefused(refusals.bad_devices(event.member_id, problem))
    if reason := job.stop_reason:
        raise EventRefused(refusals.stopped(job.spec.job, "is being stopped", reason))
    if event.incarnation in job.table.expelled:
        refusal = job.table.expelled[event.incarnation]
        raise EventRefused(refusal or _fenced(job, known, event))
    is_connected = known is not None and known.disconnected_s is None
    if known is not None and is_connected and is_older(event.incarnation, known.incarnation):
        raise EventRefused(_fenced(job, known, event))
    if error := job.setbacks.left_out(event.member_id, now_s):
        raise EventRefused(
            refusals.cannot_bring_up(job.spec.job, event.member_id, MAX_TRIES, error)
        )
    if not job.members:
        job.spec = event.spec
    elif not job.spec.fits(event.spec):
        raise EventRefused(refusals.other_bounds(event.spec, job.spec))
    if known is not None:
        endings.remove(job, known, "a new process took its place", now_s)
    member = MemberState(
        member_id=event.member_id,
        incarnation=event.incarnation,
        info=event.info,
        joined_s=now_s,
        wait=Wait(since_s=now_s),
    )
    job.table.admit(member)
    job.emit(AdmitMember(member_id=member.member_id, incarnation=member.incarnation))
    job.log("member_joined", f"{member.member_id} joined from {event.info.host}", member)
    if job.announced.num_members:
        job.notify_member(member, pausing.notice(job))


def _reconnected(job: JobState, member: MemberState, generation: Generation, now_s: float) -> None:
    """`generation`: the newest that the member has entered, or began to bring up."""
    job.table.note_stream_back(member)
    if job.record is not None:
        # If etcd was restored to an earlier time, the member may be in a generation that is missing
        # there: it is over, and the next one has a higher number.
        job.last_generation = max(job.last_generation, generation)
    if not job.attempt_is_synchronous:
        # No step report of an asynchronous member tells a new leader that it has trained.
        member.entered = max(member.entered, generation)
    _repeat_notices(job, member, generation, now_s)


def disconnected(job: JobState, member: MemberState, now_s: float) -> None:
    job.table.disconnect(member, now_s)


def halted(job: JobState, member: MemberState, now_s: float) -> None:
    job.table.halt(member, now_s)
    job.log("member_halted", f"a signal halted {member.member_id}", member)


def continued(job: JobState, member: MemberState) -> None:
    job.table.note_continued(member)
    job.log("member_continued", f"{member.member_id} goes on", member)


def _repeat_notices(
    job: JobState, member: MemberState, generation: Generation, now_s: float
) -> None:
    """Repeat notices that a reconnected member may have missed. `generation`: the newest that the
    member has entered, or began to bring up."""
    agreement, running = job.agreement, job.running
    missed_end = _is_over(job, member, generation)
    if missed_end:
        job.notify_member(member, job.break_notice(generation))
    attempted = agreement is not None and member.is_in(agreement.roster)
    trains = running is not None and member.is_in(running)
    if agreement is not None and attempted and job.phase is Phase.PREPARE:
        job.notify_member(member, job.prepare_notice(agreement))
    elif agreement is not None and job.phase is Phase.COMMITTED and (attempted or trains):
        assert job.record is not None
        job.notify_member(member, OutcomeNotice(reason=job.record.reason, record=job.record))
        if agreement.stop_at is not None:
            job.notify_member(member, job.stop_notice(agreement.generation, agreement.stop_at))
    elif running is not None and trains:
        job.notify_member(
            member,
            RunningNotice(reason=job.reason, generation=running.generation),
        )
    elif not member.settled and not missed_end:
        # The member missed the break of its last generation.
        job.notify_member(member, job.break_notice(job.last_generation))
    if job.announced.num_members:
        job.notify_member(member, pausing.notice(job))
    if member.is_standby:
        job.notify_member(member, StandbyNotice(reason=member.waiting_for, position=0))
    if trains and (num := job.table.num_announced_waiting):
        notice = WaitingNotice(reason=f"{num} more members wait", num_members=num)
        job.notify_member(member, notice)
    if job.is_completing:
        job.notify_member(member, ClosingNotice(reason=job.reason))
    if reason := job.stop_reason:
        draining.notify_stopping(job, member, reason, now_s)
    elif member.drain.since_s is not None:
        draining.request_drain(job, member, member.drain.reason, now_s)


def _is_over(job: JobState, member: MemberState, generation: Generation) -> bool:
    """True if the synchronous generation that the member reports is over, or now formed without it.

    A leader may have died after it aborted the generation and before it notified members. Without a
    notice, a member would wait for its peers until a time limit.
    """
    running, attempt = job.running, job.attempt
    if job.phase is not Phase.COMMITTED:
        attempt = None
    newest = max((r.generation for r in (running, attempt) if r is not None), default=0)
    left_out = not member.is_in(running) and not member.is_in(attempt)
    over = NO_GENERATION < generation <= job.last_generation
    return over and (generation > newest or left_out) and job.attempt_is_synchronous


def is_older(incarnation: str, than: str) -> bool:
    """True if the process `incarnation` started before the process `than`, by their hosts' clocks.

    Only UUIDs of version 7 (RFC 9562) show their time. So a late call of an older process cannot
    replace the newer one.
    """
    first, second = _version_7(incarnation), _version_7(than)
    return first is not None and second is not None and first < second


def _version_7(text: str) -> UUID | None:
    try:
        value = UUID(text)
    except ValueError:
        return None
    return value if value.version == 7 else None
