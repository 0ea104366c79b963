"""State machine of one job's membership: its members agree on each generation. Shoal's core.

`Job.handle(event, now_s)` and `Job.tick(now_s)` return effects in their order; a `WriteGeneration`
is durable before any later effect. A refused event raises `EventRefused` and leaves the state
unchanged.

A generation forms in three phases. COLLECT waits for the wanted members, then draws up the roster.
PREPARE sends the roster to its members; all must accept the same digest. COMMITTED begins with one
durable record for all. The members bring the generation up, and it runs when the last one is ready.
A failure ends the attempt in one durable ABORTED record.

During a planned change (a join or a drain), the old generation trains on, up to the boundary, a
step that all its members share. Each member offers the first step that it has not begun, and waits
before that step until the boundary is known: the highest offer. Synchronous members are at most one
step apart, so this takes at most one step.

A loss breaks the generation at once. Survivors settle (stop, and report their step) and form the
next one without waiting for others. Members of an asynchronous job need neither boundary nor
settling.

`Job._apply` is the table of events by phase, and `Job._advance` takes the transitions without an
event. Each phase has a module: `collect`, `prepare`, `committed`, `running`.
"""

from collections.abc import Iterator

from shoal_server.core.generations.progress import JobProgress, JobResult
from shoal_server.core.job import (
    arrivals,
    collect,
    committed,
    draining,
    endings,
    pausing,
    prepare,
    running,
)
from shoal_server.core.job.job_state import JobEnd, JobState, limit_passed
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    BreakReported,
    DrainRequested,
    Effect,
    EventRefused,
    HeartbeatReceived,
    MemberEvent,
    MemberJoined,
    MemberLeft,
    MemberLost,
    MemberPaused,
    MemberResumed,
    MemberWorkDone,
    NextStepReached,
    ProcessContinued,
    ProcessHalted,
    ReadinessReported,
    Refusal,
    RosterAnswered,
    SaveJobRecord,
    StepReported,
    StreamDisconnected,
    TrainingProposed,
)
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import OVER, Phase, Trigger


class Job(JobState):
    """State machine of one job. Its edge only reads the attributes."""

    # --- calls of the edge ---

    def handle(self, event: MemberEvent, now_s: float) -> list[Effect]:
        """Apply one event, and return the effects. Raises EventRefused."""
        pausing.keep_limits(self, now_s)
        if isinstance(event, MemberJoined):
            arrivals.joined(self, event, now_s)
        else:
            self._apply(arrivals.require_member(self, event), event, now_s)
        return self._decide(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Act on passed deadlines."""
        pausing.keep_limits(self, now_s)
        deadlines = self.deadlines
        for member, reason, cause in self.table.overdue(now_s, suspects=self.suspected):
            if self.members.get(member.member_id) is member:
                endings.remove(self, member, reason, now_s, cause=cause)
        if limit_passed(deadlines.suspect_since_s, self.limits.reconnect_s, now_s):
            endings.break_off(self, (), f"{self.reason}; all members still answer", now_s)
        if limit_passed(deadlines.broken_since_s, self.limits.collective_s, now_s):
            running.drop_unsettled(self, now_s)
        if limit_passed(deadlines.overdue_check_s, 0.0, now_s):
            collect.drop_overdue(self, now_s)
        pausing.drop_overdue(self, now_s)
        return self._decide(now_s)

    def next_deadline_s(self) -> float | None:
        """Return the time of the next call of `tick`; None if no deadline is set."""
        return min(self._deadlines(), default=None)

    def stop(self, reason: str, now_s: float) -> list[Effect]:
        """Make all members leave at their next step boundary, which ends the job. May be repeated,
        by a new leader too."""
        if self.phase not in OVER:
            if self.stop_reason != reason:
                self.end.stopping = reason
                self.log("job_stopping", reason)
                self.emit(SaveJobRecord())
            for member in list(self.members.values()):
                draining.request_drain(self, member, reason, now_s)
            if not self.members:
                endings.end_job(self, Trigger.STOPPED, reason, now_s)
        self._advance(now_s)
        return self.pop_effects()

    def abandon(self, reason: str, now_s: float) -> list[Effect]:
        """End a job without members as failed, unless it is over."""
        endings.abandon(self, reason, now_s)
        return self.pop_effects()

    def keep_result(self, result: JobResult) -> list[Effect]:
        """Keep the result of a job in its own record, if the job is over."""
        if self.phase in OVER:
            self.tally.result = result
            self.emit(SaveJobRecord())
        return self.pop_effects()

    @property
    def retry_refusal(self) -> Refusal | None:
        """Refusal of `retry`, if the job has members or is finished."""
        if self.phase is Phase.FINISHED:
            return refusals.finished(self.spec.job, self.reason)
        if self.phase not in OVER and (self.members or self.is_completing):
            return refusals.not_over(self.spec.job, self.reason)
        return None

    def retry(self, reason: str, now_s: float, *, from_scratch: bool) -> list[Effect]:
        """Allow joins again for a job that failed, was stopped or is lost; from step 0 on request.

        Raises EventRefused if the job has members or is finished, or if its records were removed
        and `from_scratch` is false. The call may be repeated.
        """
        if (refusal := self.retry_refusal) is not None:
            raise EventRefused(refusal)
        tally = self.tally
        if tally.is_cleared and not from_scratch:
            raise EventRefused(refusals.cleared(self.spec.job))
        if from_scratch:
            self.progress = JobProgress(tally=tally)
        if self.phase in OVER:
            tally.result, tally.is_cleared = None, False
            self.end = JobEnd()
            self.apply_trigger(Trigger.RETRIED, reason, now_s)
        self.emit(SaveJobRecord())
        return self.pop_effects()

    def heartbeat(self, event: HeartbeatReceived, now_s: float) -> None:
        """Note the trainer's state in a heartbeat, in constant time."""
        member = self.members.get(event.member_id)
        if member is None or member.incarnation != event.incarnation:
            return
        if event.moved != member.trainer.moved:
            member.trainer.moved, member.trainer.moved_s = event.moved, now_s
        member.trainer.waits_for_others = event.waits
        member.trainer.own_code_since_s = now_s - event.own_code_s if event.own_code_s > 0 else None
        member.trainer.loads = event.loads

    # --- the table: phase and event -> what follows ---

    def _apply(self, member: MemberState, event: MemberEvent, now_s: float) -> None:
        """Apply the event of a member by the phase."""
        match self.phase, event:
            case Phase.PREPARE, RosterAnswered():
                prepare.answered(self, member, event, now_s)
            case Phase.COMMITTED, NextStepReached():
                committed.offered(self, member, event)
            case Phase.COMMITTED, ReadinessReported():
                committed.became_ready(self, member, event.generation, now_s, event.step)
            case _, RosterAnswered() | NextStepReached() | ReadinessReported():
                pass  # late: the attempt is decided
            case _, BreakReported() if self.table.has_finished(member):
                pass  # late: the member has no work left
            case Phase.COMMITTED, BreakReported():
                if not committed.break_reported(self, member, event, now_s):
                    running.collective_failed(self, member, event, now_s)
            case _, BreakReported():
                if not committed.late_break_reported(self, member, event, now_s):
                    running.collective_failed(self, member, event, now_s)
            case Phase.COMMITTED, MemberWorkDone():
                # The member has entered the generation, even if no report of that arrived.
                committed.became_ready(self, member, event.generation, now_s)
                endings.work_done(self, member, event, now_s)
            case _:
                self._apply_in_any_phase(member, event, now_s)

    def _apply_in_any_phase(self, member: MemberState, event: MemberEvent, now_s: float) -> None:
        match event:
            case TrainingProposed():
                collect.proposed(self, member, event.proposal, now_s)
            case StepReported():
                running.step_reported(self, member, event, now_s)
            case StreamDisconnected():
                arrivals.disconnected(self, member, now_s)
            case ProcessHalted():
                arrivals.halted(self, member, now_s)
            case ProcessContinued():
                arrivals.continued(self, member)
            case MemberPaused():
                pausing.begin(self, member, event, now_s)
            case MemberResumed():
                pausing.end(self, member, event, now_s)
            case DrainRequested():
                draining.request_drain(self, member, event.reason, now_s)
            case MemberWorkDone():
                endings.work_done(self, member, event, now_s)
            case MemberLeft():
                endings.left(self, member, event, now_s)
            case MemberLost():
                endings.remove(self, member, event.reason, now_s, cause=event.cause)
            case _:
                raise AssertionError(f"no handler for {event}")

    def _decide(self, now_s: float) -> list[Effect]:
        self._advance(now_s)
        pausing.announce(self, now_s)
        collect.notify_waiting(self)
        return self.pop_effects()

    def _advance(self, now_s: float) -> None:
        """Take the transitions that the time and the present members allow."""
        self.setbacks.release(now_s)
        if self.table.draining:
            draining.release_overdue(self, now_s)
        if self.is_completing:
            return
        if limit_passed(self.deadlines.deadline_s, 0.0, now_s):
            self._deadline_passed(now_s)
        again = False
        match self.phase:
            case Phase.COLLECT if self.running is None:
                again = collect.form(self, now_s)
            case Phase.COLLECT | Phase.RUNNING if self.running is not None:
                again = collect.change(self, now_s)
        if again:
            self._advance(now_s)

    def _deadline_passed(self, now_s: float) -> None:
        self.deadlines.deadline_s = None
        match self.phase:
            case Phase.PREPARE:
                prepare.overdue(self, now_s)
            case Phase.COMMITTED:
                committed.overdue(self, now_s)
            case Phase.ABORTED:
                is_intact = self.running is not None
                trigger = Trigger.INTACT if is_intact else Trigger.BACKED_OFF
                self.apply_trigger(trigger, self.reason, now_s)

    def _deadlines(self) -> Iterator[float]:
        yield from self.table.deadlines(suspects=self.suspected)
        yield from self.setbacks.next_release_s(self.table.candidates)
        yield from (pause.ends_s for _, pause in self.table.pauses)
        if self.deadlines.suspect_since_s is not None:
            yield self.deadlines.suspect_since_s + self.limits.reconnect_s
        if not self.pausing():
            yield from self._pausable_deadlines()

    def _pausable_deadlines(self) -> Iterator[float]:
        if self.deadlines.deadline_s is not None:
            yield self.deadlines.deadline_s
        if self.deadlines.broken_since_s is not None:
            yield self.deadlines.broken_since_s + self.limits.collective_s
        if self.deadlines.overdue_check_s is not None:
            yield self.deadlines.overdue_check_s
        for member in self.table.draining.values():
            if not member.drain.is_released and member.drain.since_s is not None:
                yield member.drain.since_s + self.limits.drain_s
        if self.phase is Phase.COLLECT and not self.is_completing:
            yield from collect.deadlines(self)
