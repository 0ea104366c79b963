"""Members that are to leave, and their notices."""

from shoal_server.core.generations.roster import GenerationRoster
from shoal_server.core.job import endings
from shoal_server.core.job.job_state import JobState, limit_passed
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import DrainNotice
from shoal_server.core.membership.member import MemberState


def request_drain(job: JobState, member: MemberState, reason: str, now_s: float) -> None:
    if job.table.has_finished(member):
        job.notify_member(member, DrainNotice(reason=reason, now=True))
        return
    if member.drain.since_s is None:
        job.table.drain(member, reason, now_s)
        job.log("drain_requested", f"{member.member_id} is to leave: {reason}", member)
    _notify_drain(job, member, reason, now=member.drain.is_released, now_s=now_s)


def release_overdue(job: JobState, now_s: float) -> None:
    """Notify members to leave now if no planned change can replace them first."""
    for member in list(job.table.draining.values()):
        if member.drain.is_released or _is_worth_waiting(job, member, now_s):
            continue
        member.drain.is_released = True
        member.set_wait("nothing: it leaves at its next step boundary", now_s)
        _notify_drain(job, member, member.drain.reason, now=True, now_s=now_s)


def notify_stopping(job: JobState, member: MemberState, reason: str, now_s: float) -> None:
    """Notify a member of a stopped job to leave now."""
    _notify_drain(job, member, reason, now=True, now_s=now_s)


def _notify_drain(
    job: JobState, member: MemberState, reason: str, *, now: bool, now_s: float
) -> None:
    no_generation_follows = now and _no_generation_follows(job, member, now_s)
    job.notify_member(
        member, DrainNotice(reason=reason, now=now, no_generation_follows=no_generation_follows)
    )


def _no_generation_follows(job: JobState, member: MemberState, now_s: float) -> bool:
    """True if the member may take further steps until a checkpoint is written, as no generation
    follows. False once its drain is overdue while it trains with members that stay: those steps
    need the others, which may hang."""
    running = job.running
    if running is None:
        return member.holds_state and len(job.table.draining) == len(job.members)
    if not running.synchronous or not member.is_in(running):
        return False
    all_leave = all(each.drain.since_s is not None for each in job.members_of(running))
    return all_leave or not limit_passed(member.drain.since_s, job.limits.drain_s, now_s)


def _is_worth_waiting(job: JobState, member: MemberState, now_s: float) -> bool:
    # If the member left during a planned change, its state would be lost.
    if _may_hand_over(job, member) or _is_changing(job, member):
        return not limit_passed(member.drain.since_s, job.limits.drain_s, now_s)
    roster = job.attempt if member.is_in(job.attempt) else job.running
    if roster is None or not roster.synchronous or not member.is_in(roster):
        return False
    if job.is_completing or limit_passed(member.drain.since_s, job.limits.drain_s, now_s):
        return False
    candidates = job.table.candidates
    if len(candidates) >= job.min_roster_size and any(m.is_in(roster) for m in candidates.values()):
        return True
    # Otherwise a member that is still joining has to receive the state.
    return any(m.drain.since_s is None and not m.is_in(roster) for m in job.members.values())


def _is_changing(job: JobState, member: MemberState) -> bool:
    running, attempt = job.running, job.attempt
    changes = running is not None and running.synchronous and attempt is not None
    return changes and (member.is_in(running) or member.is_in(attempt))


def _may_hand_over(job: JobState, member: MemberState) -> bool:
    """True if only draining members hold the state, and enough others are present to take it."""
    others = len(job.members) - len(job.table.draining)
    return (
        others >= job.spec.min_members
        and member.holds_state
        and job.lacks_state(job.table.candidates.values())
    )


def leavers(job: JobState, chosen: list[MemberState]) -> list[MemberState]:
    """Return draining members that train now and are not among the `chosen`."""
    if job.running is None or not job.table.draining:
        return []
    staying = {m.member_id for m in chosen}
    draining = job.table.draining.values()
    return [m for m in draining if m.is_in(job.running) and m.member_id not in staying]


def part_leavers(
    job: JobState, old: GenerationRoster, roster: GenerationRoster, now_s: float
) -> None:
    """Remove the draining members that are not in the new `roster`. Other members that are not in
    it get a BreakNotice."""
    for leaver in [m for m in job.members_of(old) if not m.is_in(roster)]:
        if leaver.drain.since_s is not None:
            job.notify_member(leaver, DrainNotice(reason=leaver.drain.reason, now=True))
            reason = leaver.drain.reason
            # Answers a call of the member that arrives before the member has read its notice.
            refusal = refusals.drained(job.spec.job, leaver.member_id, reason)
            why = f"drained: {reason}"
            endings.remove(job, leaver, why, now_s, refusal=refusal, cause=why, lost=False)
        elif job.table.has_finished(leaver):
            job.notify_member(leaver, job.break_notice(old.generation))
        else:
            # The member waits at the boundary, and will repeat its request to leave, which an
            # earlier leader got.
            job.table.settle((leaver,), settled=False)
            job.notify_member(leaver, job.break_notice(old.generation))
