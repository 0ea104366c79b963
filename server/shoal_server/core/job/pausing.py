"""Pauses that other members wait for, during which the limits do not run."""

from shoal_server.core.job import endings
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import MemberPaused, MemberResumed, PausesNotice
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.pauses import MAX_NAMES, PausedMembers, pause_in_words


def begin(job: JobState, member: MemberState, event: MemberPaused, now_s: float) -> None:
    known = job.table.pauses.of(member)
    pause = job.table.pauses.begin(member, event, now_s)
    if known is None and pause is not None:
        text = pause_in_words(member, job.rank_of(member), pause)
        text += f", {pause.limit_s:g} s at the most"
        job.log("member_paused", text, member)


def end(job: JobState, member: MemberState, event: MemberResumed, now_s: float) -> None:
    pause = job.table.pauses.end(member, event.number)
    # The time in the script's own code belonged to the pause.
    member.trainer.own_code_since_s = None
    if pause is not None:
        text = f"{member.member_id} goes on after {now_s - pause.since_s:.1f} s: {pause.reason}"
        job.log("member_resumed", text, member)


def keep_limits(job: JobState, now_s: float) -> None:
    """Move the limits by the time of a pause, except those that detect a loss. Call before any
    other check."""
    by_s = job.table.pauses.hold(now_s, held=bool(job.pausing()))
    if not by_s:
        return
    job.deadlines.extend(by_s)
    job.table.postpone_drains(by_s)


def announce(job: JobState, now_s: float) -> None:
    """Notify all members if that is worth a notice. Call after each event."""
    pausing = job.pausing()
    job.table.pauses.hold(now_s, held=bool(pausing))
    names = tuple(member.member_id for member, _ in pausing[:MAX_NAMES])
    paused = PausedMembers(num_members=len(pausing), member_ids=names)
    if paused.is_worth_a_notice(job.announced):
        job.announced = paused
        send_notice(job)


def send_notice(job: JobState) -> None:
    """Send all members the pauses: they restart or stop their own limits."""
    pauses = notice(job)
    for member in job.members.values():
        job.notify_member(member, pauses)


def notice(job: JobState) -> PausesNotice:
    reason = job.why_paused() or job.reason
    return PausesNotice(reason=reason, member_ids=job.announced.member_ids)


def drop_overdue(job: JobState, now_s: float) -> None:
    """Remove members with an overlong pause, which count as hung."""
    for member, pause in job.table.pauses:
        if now_s >= pause.ends_s and job.members.get(member.member_id) is member:
            text = pause_in_words(member, job.rank_of(member), pause, now_s)
            endings.refuse(job, member, refusals.pause_over(text, pause.limit_s), now_s)
