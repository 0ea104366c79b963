"""RUNNING: failed collectives, and the survivors' reports after a break."""

from dataclasses import replace

from shoal_server.core.generations.roster import NO_GENERATION, Generation
from shoal_server.core.job import endings
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import BreakReported, StepReported
from shoal_server.core.membership.member import MAX_NAMES, MemberState
from shoal_server.core.membership.phases import Phase


def collective_failed(
    job: JobState, member: MemberState, event: BreakReported, now_s: float
) -> None:
    """Handle a failed collective: a disconnected member is probably lost, or comes back soon if
    all connections broke."""
    running = job.running
    if running is None or event.generation != running.generation:
        if NO_GENERATION < event.generation <= job.last_generation:
            # The member missed the notice, or an earlier leader sent it.
            job.notify_member(member, job.break_notice(event.generation))
        return
    if not running.synchronous:
        return
    job.reason = f"a collective failed under {member.member_id}: {event.error}"
    if job.deadlines.suspect_since_s is None:
        job.deadlines.suspect_since_s = now_s
    trainers = job.table.trainers(running)
    if in_code := _members_in_own_code(job, [m for m in trainers if m is not member], now_s):
        job.reason = f"{in_code}; {refusals.OWN_CODE_FIX}"
    job.log("collective_failed", job.reason, member)
    member.reported_broken = running.generation
    if all(m.reported_broken == running.generation for m in trainers):
        # All members are connected: no loss explains the break.
        endings.break_off(job, (), f"{job.reason}; all members answer", now_s)


def step_reported(job: JobState, member: MemberState, event: StepReported, now_s: float) -> None:
    """Note that the member has stopped, with the state after this step. Ends the attempt or
    generation that it has left."""
    job.refuse_if_over()
    if event.left < member.entered or job.table.has_finished(member):
        return  # late: the member has trained since
    member.entered = event.left
    _end_left_generation(job, member, event.left, now_s)
    committed = job.attempt if job.phase is Phase.COMMITTED else None
    if member.is_in(job.running) or member.is_in(committed):
        return
    if member.proposal is not None:
        step, has_state = event.step, event.has_state
        member.proposal = replace(member.proposal, step=step, has_state=has_state)
        if has_state and not member.proposal.stateless:
            job.progress.note_reached(step)
    job.table.settle((member,), settled=True)
    if event.enough_for_call:
        job.table.in_call[member.member_id] = event.enough_for_call
    if not job.setbacks.waits(member.member_id):
        member.set_wait("the other members to report their step", now_s)
    if job.table.all_settled:
        job.deadlines.broken_since_s = None


def _end_left_generation(
    job: JobState, member: MemberState, left: Generation, now_s: float
) -> None:
    """End the attempt or generation that the member has left: an earlier leader notified the member
    of a break that never became durable."""
    reason = f"{member.member_id} has left generation {left}"
    running = job.running
    committed = job.attempt if job.phase is Phase.COMMITTED else None
    # The newest generation may have been aborted, and this attempt older.
    if committed is not None and member.is_in(committed) and left >= committed.generation:
        endings.abort(job, reason, now_s)
    if running is not None and member.is_in(running) and left >= running.generation:
        endings.break_off(job, (), reason, now_s)


def drop_unsettled(job: JobState, now_s: float) -> None:
    job.deadlines.broken_since_s = None
    limit = f"{job.limits.collective_s:g} s"
    for member in job.table.unsettled():
        if job.members.get(member.member_id) is member:
            reason = f"{member.member_id} did not stop within {limit} of the break"
            if in_code := _members_in_own_code(job, [member], now_s):
                endings.refuse(job, member, refusals.in_own_code(f"{in_code}: {reason}"), now_s)
            else:
                endings.refuse(job, member, refusals.timeout(reason), now_s)


def _members_in_own_code(job: JobState, members: list[MemberState], now_s: float) -> str:
    """Name the members that have been in the script's own code for at least half of `collective_s`,
    or return ""."""
    texts = []
    for member in members:
        since_s = member.trainer.own_code_since_s
        if since_s is None or now_s < since_s + job.limits.collective_s / 2:
            continue
        rank = job.rank_of(member)
        name = member.member_id if rank is None else f"rank {rank} ({member.member_id})"
        does = "waiting for a batch to be loaded" if member.trainer.loads else "in your code"
        texts.append(f"{name} has been {does} for {now_s - since_s:.0f} s")
    return ", ".join(texts[:MAX_NAMES])
