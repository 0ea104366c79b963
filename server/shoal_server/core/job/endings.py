"""Ends of an attempt, a generation, a membership and the job."""

from shoal_proto.back_off import doubled_s
from shoal_server.core.generations.conflicts import shorten_conflicts
from shoal_server.core.generations.roster import Conflict, GenerationRoster, Verdict
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    BreakNotice,
    ClosingNotice,
    ExpelMember,
    FinishJob,
    MemberLeft,
    MemberWorkDone,
    OutcomeNotice,
    Refusal,
    RefusalKind,
    RefusedNotice,
    SaveJobRecord,
    WriteGeneration,
)
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import Phase, Trigger

FIRST_BACK_OFF_S = 0.05
MAX_BACK_OFF_S = 5.0


def abort(job: JobState, reason: str, now_s: float, conflicts: tuple[Conflict, ...] = ()) -> None:
    """End the attempt with one record for all its members.

    The old generation continues, unless the boundary may have been agreed: members may then have
    left it.
    """
    agreement = job.agreement
    assert agreement is not None
    roster, concerned = agreement.roster, job.members_to_notify(agreement.roster)
    brought_up = job.phase is Phase.COMMITTED and roster.synchronous
    if brought_up:
        job.tries.failed_roster = roster
    old_is_over = job.running is None or agreement.may_have_stopped
    job.apply_trigger(Trigger.FAILED, reason, now_s)
    record = job.record_of(Verdict.ABORTED, reason, now_s, conflicts)
    job.agreement, job.tries.failures = None, job.tries.failures + 1
    if roster.synchronous and (job.running is None or (brought_up and old_is_over)):
        job.tally.begin_idle(now_s)
    job.emit(WriteGeneration(record=record))
    if brought_up and old_is_over and job.running is not None:
        # Sent before the outcome: members at the boundary must not take the abort as permission to
        # train.
        old, job.running = job.running, None
        job.tries.changes.record_break(reason, now_s)
        notify_broken(job, old, (), reason, now_s)
    notice = OutcomeNotice(reason=reason, record=record)
    for member in concerned:
        job.notify_member(member, notice)
    if brought_up and old_is_over:
        notify_broken(job, roster, (), reason, now_s)
    elif brought_up:
        newcomers = [m for m in job.members_of(roster) if not m.is_in(job.running)]
        # A new leader may wrongly assume that the old generation ran while newcomers trained in the
        # new one.
        job.table.settle(newcomers, settled=False)
    job.previous = job.running or job.previous
    failures = job.tries.failures
    back_off_s = doubled_s(FIRST_BACK_OFF_S, MAX_BACK_OFF_S, failures - 1)
    # Survivors of one loss try again at once.
    again_s = now_s + (back_off_s if failures > 1 else 0.0)
    job.deadlines.deadline_s = None if job.is_completing else again_s


def break_off(job: JobState, lost: tuple[str, ...], reason: str, now_s: float) -> None:
    """End the running generation. Its survivors settle, then the next one forms."""
    if job.agreement is not None:
        abort(job, reason, now_s)
    running, job.running = job.running, None
    job.deadlines.suspect_since_s = None
    if running is None:
        return  # the abort ended it and notified its members
    job.tries.is_after_break = not job.stop_reason
    if running.synchronous:
        job.tally.begin_idle(now_s)
        job.tries.changes.record_break("" if lost else reason, now_s)
    if job.phase is not Phase.ABORTED:
        job.apply_trigger(Trigger.BROKEN, reason, now_s)
    notify_broken(job, running, lost, reason, now_s)


def notify_broken(
    job: JobState, roster: GenerationRoster, lost: tuple[str, ...], reason: str, now_s: float
) -> None:
    if not roster.synchronous:
        return
    job.deadlines.broken_since_s = now_s
    generation = roster.generation
    members = job.members_of(roster)
    job.table.settle(members, settled=False)
    notice = BreakNotice(reason=reason, generation=generation, lost_member_ids=lost)
    for member in members:
        member.set_wait(f"its trainer to stop after the break ({reason})", now_s)
        job.notify_member(member, notice)


def remove(
    job: JobState,
    member: MemberState,
    reason: str,
    now_s: float,
    *,
    completed: bool = False,
    refusal: Refusal | None = None,
    cause: str = "",
    lost: bool = True,
) -> None:
    """Remove a member. Unless its work is done, this ends its attempt or generation; in a
    completing job, the last removal ends the job.

    `completed`: True if the member left with its work done. `refusal`: answer to later calls of its
    process. `cause`: the reason in a word or two. `lost`: True if the member did not leave in
    order.
    """
    job.tries.changes.record_departure(member.member_id, cause or reason, lost=lost)
    has_work = not job.table.has_finished(member)
    trained = member.is_in(job.running) and has_work
    attempted = member.is_in(job.attempt) and has_work
    reason = f"{member.member_id}: {reason}"
    job.table.remove(member, refusal)
    if not job.members:
        job.tally.begin_idle(now_s)
    job.emit(ExpelMember(member_id=member.member_id, incarnation=member.incarnation, reason=reason))
    job.log("member_completed" if completed else "member_removed", reason, member)
    if not job.table.candidates:
        job.deadlines.first_proposal_s = job.deadlines.short_since_s = None
    if not job.members and job.table.finished:
        newest, done = job.running or job.previous, job.table.finished
        if newest is not None and done.issuperset(newest.ranks) and not job.is_completing:
            # An earlier leader did not complete the job.
            job.end.completing, job.reason = True, "all members have done their work"
        # The next members need the whole minimum again.
        job.table.finished.clear()
        if not job.is_completing:
            job.emit(SaveJobRecord())  # else written with the job's end
    if job.is_completing:
        roster = job.running or job.attempt
        if (trained or attempted) and not completed and roster is not None:
            notify_broken(job, roster, (member.member_id,), reason, now_s)
        if job.agreement is not None:
            job.agreement.forget(member.member_id)
        if not job.members and job.loss_refusal is None:
            end_job(job, Trigger.COMPLETED, job.reason, now_s)
        return
    if attempted:
        abort(job, reason, now_s)
    if trained and job.running is not None:
        break_off(job, (member.member_id,), reason, now_s)
    if job.stop_reason and not job.members:
        end_job(job, Trigger.STOPPED, job.stop_reason, now_s)


def refuse(job: JobState, member: MemberState, refusal: Refusal, now_s: float) -> None:
    job.notify_member(member, RefusedNotice(reason=refusal.what, refusal=refusal))
    text = f"{member.member_id} was refused: {refusal.what}"
    job.log("member_refused", text, member)
    # A member that was too late may join again as a new process: its old one is fenced like a lost
    # one.
    lasting = refusal if refusal.kind != RefusalKind.TIMEOUT else None
    reason = f"refused: {refusal.what}"
    remove(job, member, reason, now_s, refusal=lasting, cause=refusal.what)


def abort_conflicting(job: JobState, conflicts: tuple[Conflict, ...], now_s: float) -> None:
    """Abort, and refuse the suspects among the roster's members."""
    roster, conflicts = job.attempt, shorten_conflicts(conflicts)
    assert roster is not None
    at_fault = job.suspects_of(job.members_of(roster))
    reason = "members differ in " + "; ".join(str(c) for c in conflicts)
    abort(job, reason, now_s, conflicts)
    for member in at_fault:
        refuse(job, member, refusals.conflict(job.spec.job, conflicts), now_s)


def lose_state(job: JobState, seen: str, now_s: float) -> None:
    """End the job, whose state is gone: only an operator may start it over."""
    lost = refusals.state_lost(job.spec.job, job.progress, seen)
    job.end.lost = lost
    abort(job, lost.what, now_s)
    job.apply_trigger(Trigger.STATE_LOST, lost.what, now_s)
    job.end.completing = True
    job.deadlines.stop()
    job.emit(FinishJob(reason=job.reason))
    for member in list(job.members.values()):
        refuse(job, member, lost, now_s)


def work_done(job: JobState, member: MemberState, event: MemberWorkDone, now_s: float) -> None:
    if event.finished:
        finish(job, member, event.reason, now_s)
    if event.closes and not job.is_completing:
        complete(job, member, event.reason, now_s)


def left(job: JobState, member: MemberState, event: MemberLeft, now_s: float) -> None:
    # A member that joins with its work done does not end the others' training.
    trained = job.running or job.previous
    concerns_all = trained is None or member.is_in(trained)
    if event.completed and member.proposal is not None and member.proposal.stateless:
        # torchrun's nodes may end at different times.
        finish(job, member, event.reason, now_s)
    elif event.completed and concerns_all and not job.is_completing:
        complete(job, member, event.reason, now_s)
    remove(
        job,
        member,
        f"left: {event.reason}",
        now_s,
        completed=event.completed,
        cause=event.reason or "of its own",
        lost=False,
    )
    if event.failed and not job.is_completing and (trained is None or not job.members_of(trained)):
        # A member that has not trained would find no work left, and finish the job.
        reason = f"{member.member_id}: left: {event.reason}"
        failed = refusals.stopped(job.spec.job, "has failed", reason)
        for standby in list(job.members.values()) if trained is not None else ():
            refuse(job, standby, failed, now_s)
        abandon(job, reason, now_s)


def finish(job: JobState, member: MemberState, why: str, now_s: float) -> None:
    """Stop waiting for a member that has done its work; the last one completes the job. Ignored for
    a member outside of the newest generation."""
    table, agreement = job.table, job.agreement
    trained = job.running or job.previous
    if trained is None:
        is_last = all(m is member for m in table.candidates.values())
    elif not member.is_in(trained):
        return
    elif table.has_finished(member):
        # A repeated report: an earlier leader may not have completed the job.
        is_last = table.finished.issuperset(trained.ranks)
    else:
        table.finish(member)
        is_last = not table.trainers(trained)
        job.emit(SaveJobRecord())
        reason = f"{member.member_id} has done its work" + (f": {why}" if why else "")
        job.log("member_finished", reason, member)
        member.set_wait("nothing: its work is done", now_s)
        if agreement is not None and member.member_id in agreement.unready:
            abort(job, reason, now_s)
        elif agreement is not None:
            agreement.forget(member.member_id)
    if is_last and not job.is_completing:
        complete(job, member, why, now_s)


def complete(job: JobState, leaver: MemberState, why: str, now_s: float) -> None:
    """Close the job to new members, and refuse those that have not trained. Its trainers finish; a
    planned change, or an attempt in PREPARE, is aborted."""
    job.end.completing = True
    reason = f"{leaver.member_id} completed its work" + (f": {why}" if why else "")
    job.log("job_completing", reason)
    # A new leader must not take the leaver for lost.
    job.emit(SaveJobRecord())
    if job.agreement is not None and (job.running or job.phase is Phase.PREPARE):
        job.agreement.stop_at = None  # members with steps left continue
        abort(job, reason, now_s)
        if job.running is not None:
            job.apply_trigger(Trigger.INTACT, reason, now_s)
    job.deadlines.deadline_s, job.reason = None, reason
    # Members that have trained finish by themselves.
    trained = job.running or job.previous
    newcomers = [m for m in job.members.values() if not m.is_in(trained)]
    for member in [m for m in newcomers if m is not leaver]:
        refuse(job, member, refusals.finished(job.spec.job, reason), now_s)
    for member in job.members.values():
        job.notify_member(member, ClosingNotice(reason=reason))


def abandon(job: JobState, reason: str, now_s: float) -> None:
    """End a job without members as failed, unless it is over."""
    if job.members or job.phase not in (Phase.COLLECT, Phase.ABORTED):
        return
    end_job(job, Trigger.ABANDONED, reason, now_s)


def end_job(job: JobState, trigger: Trigger, reason: str, now_s: float) -> None:
    """End a job without members."""
    job.apply_trigger(trigger, reason, now_s)
    job.running = job.agreement = None
    job.deadlines.stop()
    job.emit(FinishJob(reason=job.reason))
