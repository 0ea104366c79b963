"""COMMITTED: the members bring the generation up, which runs once the last one is ready. Until
then, an old generation trains on, up to the boundary."""

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.roster import Generation, GenerationRoster, Step
from shoal_server.core.job import draining, endings, pausing
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    BreakReported,
    NextStepReached,
    RunningNotice,
    SaveJobRecord,
)
from shoal_server.core.membership.member import MemberState, names_of
from shoal_server.core.membership.phases import Phase, Trigger
from shoal_server.core.membership.setbacks import MAX_TRIES


def offered(job: JobState, member: MemberState, event: NextStepReached) -> None:
    agreement = job.agreement
    if agreement is None or event.generation != agreement.generation:
        return
    if job.running is None or not member.is_in(job.running):
        return
    if agreement.stop_at is not None:
        job.notify_member(member, job.stop_notice(agreement.generation, agreement.stop_at))
    elif agreement.offer(member.member_id, event.next_step):
        assert agreement.stop_at is not None
        stop_at = agreement.stop_at
        job.log("boundary_agreed", f"the old generation stops at step {stop_at}")
        for old_member in job.members_of(job.running):
            job.notify_member(old_member, job.stop_notice(agreement.generation, stop_at))


def became_ready(
    job: JobState,
    member: MemberState,
    generation: Generation,
    now_s: float,
    step: Step | None = None,
) -> None:
    """Note the member's first collective; the last one makes the generation run. `step`: the step
    of the member's state, if stated."""
    agreement = job.agreement_of(member, generation)
    if agreement is None:
        return
    member.entered = agreement.generation
    if not agreement.ready(member.member_id, step):
        member.set_wait(f"the others' first collective in generation {generation}", now_s)
        return
    roster, old = agreement.roster, job.running
    job.running, job.agreement = roster, None
    job.deadlines.deadline_s = job.deadlines.broken_since_s = None
    job.deadlines.suspect_since_s = job.deadlines.overdue_check_s = None
    job.deadlines.short_since_s = None
    job.tries.failures = job.tries.num_excluded = 0
    job.setbacks.succeeded(roster.member_ids)
    assert job.record is not None
    cause = job.record.reason
    reason = f"generation {roster.generation}: {cause}"
    job.apply_trigger(Trigger.READY, reason, now_s)
    trainers = job.members_of(roster)
    start, reached = Step(0), job.progress.reached
    if roster.synchronous:
        start = _note_start(job, agreement, trainers)
    _log_story(job, roster, cause, start=start, reached=reached, now_s=now_s)
    notice = RunningNotice(reason=reason, generation=roster.generation)
    for trainer in trainers:
        trainer.set_wait("nothing: it trains", now_s)
        job.notify_member(trainer, notice)
    if old is not None and roster.synchronous:
        draining.part_leavers(job, old, roster, now_s)


def _log_story(
    job: JobState, roster: GenerationRoster, cause: str, *, start: Step, reached: Step, now_s: float
) -> None:
    changes = job.tries.changes
    job.tally.end_idle(now_s)
    if changes.newest_ran == roster.generation:
        # An earlier leader has logged this.
        reason = f"generation {roster.generation} continues under a new leader"
        job.log("leader_took_over", reason)
    else:
        story = changes.summarize(roster, cause, start=start, reached=reached, now_s=now_s)
        reason = job.reason
        job.log("generation_running", reason, story=story)
    changes.clear_for(roster)


def _note_start(job: JobState, agreement: Agreement, trainers: list[MemberState]) -> Step:
    """Note and return the step from which a synchronous generation starts."""
    start, reached = agreement.starts_at, job.progress.reached
    if start is None:
        start = max(agreement.stop_at or agreement.roster.step, reached)
    job.table.hold_state(trainers, start)
    if any(m.proposal is not None and m.proposal.stateless for m in trainers):
        return start
    if start < reached:
        reason = f"generation {agreement.generation} continues from step {start}"
        job.log("job_rolled_back", f"{reason}; the job had reached step {reached}")
    if job.progress.record_run(agreement.generation, start):
        # Durable before any member takes a step.
        job.emit(SaveJobRecord())
    return start


def overdue(job: JobState, now_s: float) -> None:
    """Expel the members that hold up a bring-up, or move the deadline if it makes progress.

    Members that only wait are not to blame.
    """
    agreement = job.agreement
    assert agreement is not None
    over_s = job.deadlines.bring_up_over_s
    is_over = over_s is not None and now_s >= over_s
    concerned = job.members_to_notify(agreement.roster)
    moved_s = max((m.trainer.moved_s for m in concerned), default=float("-inf"))
    if now_s < moved_s + job.limits.bring_up_s and not is_over:
        job.deadlines.deadline_s = moved_s + job.limits.bring_up_s
        # Members that wait for this bring-up restart their limits.
        pausing.send_notice(job)
        return
    to_stop = job.running is not None and agreement.stop_at is None
    late = agreement.unoffered if to_stop and agreement.unoffered else agreement.unready
    waiting = {m.member_id for m in concerned if m.trainer.waits_for_others}
    if late <= waiting:
        names = names_of([m for m in concerned if m.member_id in late])
        limits = job.limits
        stuck = f"nothing moved for {limits.bring_up_s:g} s"
        if is_over:
            stuck = f"it was not brought up within {limits.longest_bring_up_s:g} s"
        endings.abort(job, f"{stuck}, and {names} wait for each other", now_s)
        return
    _expel_late(job, agreement.roster, late - waiting, now_s)


def _expel_late(job: JobState, attempt: GenerationRoster, names: set[str], now_s: float) -> None:
    late = [job.members[name] for name in sorted(names) if name in job.members]
    if attempt.synchronous:
        # A member that holds the state waits for those that receive it. If it hangs, it will not
        # stop after the break either.
        # A member that leaves is not in the attempt.
        late = [m for m in late if not (m.is_in(attempt) and attempt.keeps(m.member_id))] or late
    reason = f"{names_of(late)} did not bring the generation up in time"
    endings.abort(job, reason, now_s)
    for member in late:
        if attempt.synchronous:
            _blame(job, member, attempt.generation, reason, now_s)
        if job.members.get(member.member_id) is member:
            endings.refuse(job, member, refusals.timeout(reason), now_s)


def break_reported(job: JobState, member: MemberState, event: BreakReported, now_s: float) -> bool:
    """Handle a break during a bring-up; False if the report is of something else.

    A report that a synchronous job's state is lost ends the job, unless an old generation trains on
    without a boundary.
    """
    agreement = job.agreement
    assert agreement is not None
    if job.agreement_of(member, event.generation) is not None:
        is_intact = job.running is not None and agreement.stop_at is None
        if event.state_lost and agreement.roster.synchronous and not is_intact:
            endings.lose_state(job, event.error, now_s)
        else:
            _count_failure(job, member, event, now_s, ends=True)
        return True
    if agreement.has_boundary and job.running is None and member.member_id in agreement.unready:
        # A new leader could not know that members still trained in the old generation.
        endings.abort(job, f"the old generation broke under {member.member_id}", now_s)
        return True
    return False


def late_break_reported(
    job: JobState, member: MemberState, event: BreakReported, now_s: float
) -> bool:
    """Count the member's own failure in an attempt that has ended. True if this removed the
    member."""
    _count_failure(job, member, event, now_s, ends=False)
    return job.members.get(member.member_id) is not member


def _count_failure(
    job: JobState, member: MemberState, event: BreakReported, now_s: float, *, ends: bool
) -> None:
    """Decide which members a failed bring-up is blamed on. `ends`: the report ends the attempt."""
    is_own = event.own and _is_first_failure(job, member, event.generation)
    error = f"{member.member_id} could not bring it up: {event.error}"
    newcomers = _newcomers(job)
    # A member that keeps the job may fail because of newcomers, for example while it sends its
    # state. The newcomers are then put off instead.
    is_spared = is_own and member.keeps_job and bool(newcomers)
    puts_off = is_spared or (ends and not is_own and job.running is not None)
    if ends:
        endings.abort(job, error, now_s)
    if puts_off:
        _put_off(job, newcomers, error, now_s)
    if is_spared:
        member.failed_in = event.generation
        job.log("bring_up_failed", error, member)
    elif is_own:
        _blame(job, member, event.generation, event.error, now_s)


def _is_first_failure(job: JobState, member: MemberState, generation: Generation) -> bool:
    roster = _brought_up(job)
    if roster is None or roster.generation != generation or member.failed_in >= generation:
        return False
    return roster.synchronous and member.is_in(roster)


def _brought_up(job: JobState) -> GenerationRoster | None:
    if job.phase is Phase.COMMITTED:
        return job.attempt
    return job.tries.failed_roster


def _newcomers(job: JobState) -> list[MemberState]:
    roster = _brought_up(job)
    members = job.members_of(roster) if roster is not None else []
    newcomers = [m for m in members if not job.stays(m)]
    return newcomers if len(newcomers) < len(members) else []


def _put_off(job: JobState, newcomers: list[MemberState], error: str, now_s: float) -> None:
    for newcomer in newcomers:
        job.setbacks.count_shared_failure(newcomer.member_id, now_s)
        newcomer.set_wait(f"another try: in the last one, {error}", now_s)


def _blame(
    job: JobState, member: MemberState, generation: Generation, error: str, now_s: float
) -> None:
    member.failed_in = generation
    num_tries = job.setbacks.count_failure(member.member_id, error, now_s)
    reason = (
        f"{member.member_id} could not bring up generation {generation}"
        f" (try {num_tries} of {MAX_TRIES}): {error}"
    )
    job.log("bring_up_failed", reason, member)
    member.set_wait(f"another try: {reason}", now_s)
    if num_tries >= MAX_TRIES:
        job.tries.num_excluded += 1
        refusal = refusals.cannot_bring_up(job.spec.job, member.member_id, MAX_TRIES, error)
        endings.refuse(job, member, refusal, now_s)
