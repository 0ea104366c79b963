"""State machine of one job's membership: its members agree on each generation. Shoal's core.

`Job.handle(event, now_s)` and `Job.tick(now_s)` return effects, in the order in which they must
happen; a `WriteGeneration` is durable before any later effect is carried out.
`Job.next_deadline_s()` says when `tick` has something to do. A refused event raises `EventRefused`
and leaves the state as it was.

A generation forms in three phases. COLLECT waits until the wanted members are ready, then draws up
the roster. PREPARE sends the roster to its members; all must accept the same digest. COMMITTED
begins with one durable record that all members receive. They bring the generation up, and it runs
when the last member is ready. A failure ends the attempt in one durable ABORTED record with the
same reason for all.

A planned change (a member joins) goes through COLLECT and PREPARE while the old generation trains
on. Then the old generation stops at the boundary, a step that all its members share. For this, each
member offers the first step that it has not begun, and waits before that step until the boundary is
known: the highest offer. Members of a synchronous generation are never more than one step apart, so
this takes at most one step. A member offers while its trainer computes, so no collective is held
up.

A loss breaks the generation at once. Its survivors settle (stop, and report their step) and form
the next one without waiting for other members.

A planned change also leaves out a member that drains. That member leaves once the others train
without it.

Members of an asynchronous job never stop: they need neither boundary nor settling.
"""

from collections.abc import Callable

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.progress import JobProgress, JobResult, LifetimeFigures
from shoal_server.core.generations.roster import Generation, GenerationRoster, JobSpec, Step
from shoal_server.core.job.arrivals import Arrivals
from shoal_server.core.job.attempts import Attempts, RosterChecks
from shoal_server.core.job.collecting import Collecting
from shoal_server.core.job.endings import Drains, Endings, Lifetime, Removal
from shoal_server.core.job.job_state import JobState, PhaseState, limit_passed
from shoal_server.core.job.running import Breaks, BringUps, PauseKeeper
from shoal_server.core.job.timeouts import Timeouts
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import (
    BreakReported,
    DrainRequested,
    Effect,
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
    StepReported,
    StreamDisconnected,
    TrainingProposed,
)
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.membership_table import MembershipTable
from shoal_server.core.membership.pauses import Pause
from shoal_server.core.membership.phases import Phase, Trigger
from shoal_server.core.membership.setbacks import Setbacks


class Job:
    """State machine of one job. `handle` and `tick` change it; the edge only reads it."""

    def __init__(
        self,
        *,
        spec: JobSpec,
        limits: Limits,
        digest_of: Callable[[GenerationRoster], str],
        size_problem: Callable[[GenerationRoster], str] = lambda roster: "",
        phase_since_s: float = 0.0,
    ) -> None:
        """`size_problem` returns why etcd would not accept a roster's record; empty if it would."""
        table = MembershipTable(limits=limits)
        stage = PhaseState(since_s=phase_since_s)
        self.state = JobState(spec=spec, limits=limits, stage=stage, table=table)
        self.state.tally.begun_s = phase_since_s
        self._pause_keeper = PauseKeeper(self.state)
        self._endings = Endings(self.state)
        self._removal = Removal(self.state, self._endings)
        self._drains = Drains(self.state, self._removal)
        self._arrivals = Arrivals(self.state, self._pause_keeper, self._removal, self._drains)
        self._lifetime = Lifetime(self.state, self._removal, self._drains)
        self._bring_ups = BringUps(self.state, self._endings, self._removal)
        self._breaks = Breaks(self.state, self._endings, self._removal, self._bring_ups)
        self._collecting = Collecting(self.state, self._drains)
        self._attempts = Attempts(
            self.state,
            self._endings,
            self._removal,
            self._drains,
            RosterChecks(digest_of=digest_of, size_problem=size_problem),
        )
        self._timeouts = Timeouts(
            self.state,
            pause_keeper=self._pause_keeper,
            endings=self._endings,
            removal=self._removal,
            bring_ups=self._bring_ups,
            collecting=self._collecting,
        )

    def __repr__(self) -> str:
        return f"Job({self.state!r}, announced_paused={self._pause_keeper.announced_paused!r})"

    # --- calls of the edge ---

    def handle(self, event: MemberEvent, now_s: float) -> list[Effect]:
        """Apply one event, and return the effects. Raises EventRefused."""
        self._pause_keeper.keep_limits(now_s)
        if isinstance(event, MemberJoined):
            self._arrivals.joined(event, now_s)
        else:
            self._handle_event(self._arrivals.known(event), event, now_s)
        self._advance(now_s)
        self._pause_keeper.announce_pauses(now_s)
        self._collecting.notify_waiting()
        return self.state.pop_effects()

    def stop(self, reason: str, now_s: float) -> list[Effect]:
        """Make all members leave at a step boundary; the job is over once they have left."""
        self._lifetime.stop(reason, now_s)
        self._advance(now_s)
        return self.state.pop_effects()

    def abandon(self, reason: str, now_s: float) -> list[Effect]:
        """End the job as failed: it has had no members for too long."""
        self._lifetime.abandon(reason, now_s)
        return self.state.pop_effects()

    def keep_result(self, result: JobResult) -> list[Effect]:
        """Note the result of a job that is over, in the job's own record."""
        self._lifetime.keep_result(result)
        return self.state.pop_effects()

    def retry(self, reason: str, now_s: float, *, from_scratch: bool) -> list[Effect]:
        """Allow joins again for a job that failed, was stopped or is lost; from step 0 on request.

        Raises EventRefused as `Lifetime.retry` does, for example if the job runs or is finished.
        """
        self._lifetime.retry(reason, now_s, from_scratch=from_scratch)
        return self.state.pop_effects()

    def tick(self, now_s: float) -> list[Effect]:
        """Act on the deadlines that have passed."""
        self._pause_keeper.keep_limits(now_s)
        for member, reason, cause in self.state.table.overdue(now_s):
            if self.state.members.get(member.member_id) is member:
                self._removal.remove(member, reason, now_s, cause=cause)
        if limit_passed(self.state.deadlines.suspect_since_s, self.state.limits.reconnect_s, now_s):
            self._endings.break_off(
                (), f"{self.state.stage.reason}; all members still answer", now_s
            )
        if limit_passed(self.state.deadlines.broken_since_s, self.state.limits.collective_s, now_s):
            self._breaks.drop_unsettled(now_s)
        if (
            self.state.deadlines.overdue_check_s is not None
            and now_s >= self.state.deadlines.overdue_check_s
        ):
            self._timeouts.drop_overdue(now_s)
        self._timeouts.drop_paused(now_s)
        self._advance(now_s)
        self._pause_keeper.announce_pauses(now_s)
        self._collecting.notify_waiting()
        return self.state.pop_effects()

    def heartbeat(self, event: HeartbeatReceived, now_s: float) -> None:
        """Note the state of the member's trainer in a heartbeat. Has no effects.

        Cheap, since it is called for every heartbeat.
        """
        member = self.state.members.get(event.member_id)
        if member is None or member.incarnation != event.incarnation:
            return
        if event.moved != member.trainer.moved:
            member.trainer.moved, member.trainer.moved_s = event.moved, now_s
        member.trainer.waits_for_others = event.waits
        member.trainer.own_code_since_s = now_s - event.own_code_s if event.own_code_s > 0 else None
        member.trainer.loads = event.loads

    def next_deadline_s(self) -> float | None:
        """Return the time of the next call of `tick`, if no event arrives before; None: no call is
        needed."""
        return min(self._timeouts.deadlines(), default=None)

    def note_step(self, member_id: str, incarnation: str, step: Step) -> None:
        """Note the step in a heartbeat: the number of steps that the trainer has taken. Cheap."""
        self.state.note_step(member_id, incarnation, step)

    def postpone(self, by_s: float) -> None:
        """Move limits by the time in which no member could be notified: see `JobState.postpone`."""
        self.state.postpone(by_s)

    # --- state that the edge reads ---

    @property
    def spec(self) -> JobSpec:
        return self.state.spec

    @property
    def limits(self) -> Limits:
        return self.state.limits

    @property
    def phase(self) -> Phase:
        return self.state.stage.phase

    @property
    def reason(self) -> str:
        return self.state.stage.reason

    @property
    def last_generation(self) -> Generation:
        return self.state.last_generation

    @property
    def running(self) -> GenerationRoster | None:
        return self.state.running

    @property
    def previous(self) -> GenerationRoster | None:
        return self.state.previous

    @property
    def attempt(self) -> GenerationRoster | None:
        return self.state.attempt

    @property
    def members(self) -> dict[str, MemberState]:
        return self.state.members

    @property
    def table(self) -> MembershipTable:
        return self.state.table

    @property
    def setbacks(self) -> Setbacks:
        return self.state.setbacks

    @property
    def progress(self) -> JobProgress:
        return self.state.progress

    @property
    def is_completing(self) -> bool:
        return self.state.end.completing

    @property
    def lost(self) -> Refusal | None:
        return self.state.end.lost

    @property
    def tally(self) -> LifetimeFigures:
        return self.state.tally

    @property
    def stopping(self) -> str:
        """Reason for which the job was or is being stopped; empty for any other job."""
        return self.state.end.stopping

    @property
    def agreement(self) -> Agreement | None:
        return self.state.agreement

    def members_of(self, roster: GenerationRoster) -> list[MemberState]:
        """Members of the roster that are still in the job, by rank."""
        return self.state.members_of(roster)

    def pausing(self) -> list[tuple[MemberState, Pause]]:
        """Paused members that other members wait for."""
        return self._pause_keeper.pausing()

    def why_paused(self, now_s: float | None = None) -> str:
        """Text that names up to three paused members that others wait for, with their limits if
        `now_s` is given; empty if there are none."""
        return self._pause_keeper.why_paused(now_s)

    def rank_of(self, member: MemberState) -> int | None:
        """The member's rank in the running generation, else in the attempt, else in the last; None
        if the member is in none of them."""
        return self.state.rank_of(member)

    # --- handling of events ---

    def _handle_event(self, member: MemberState, event: MemberEvent, now_s: float) -> None:
        match event:
            case TrainingProposed():
                self._collecting.proposed(member, event.proposal, now_s)
            case RosterAnswered():
                self._attempts.answered(member, event, now_s)
            case StepReported():
                self._breaks.step_reported(member, event, now_s)
            case NextStepReached():
                self._attempts.offered(member, event)
            case ReadinessReported():
                self._attempts.became_ready(member, event, now_s)
            case BreakReported():
                self._breaks.handle_break(member, event, now_s)
            case StreamDisconnected():
                self._arrivals.disconnected(member, now_s)
            case ProcessHalted() | ProcessContinued():
                self._arrivals.halted(member, event, now_s)
            case DrainRequested() | MemberPaused() | MemberResumed():
                self._asked(member, event, now_s)
            case MemberLost():
                self._removal.remove(member, event.reason, now_s, cause=event.cause)
            case MemberWorkDone() | MemberLeft():
                self._ended(member, event, now_s)
            case _:
                raise AssertionError(f"no handler for {event}")

    def _ended(self, member: MemberState, event: MemberWorkDone | MemberLeft, now_s: float) -> None:
        if isinstance(event, MemberWorkDone):
            self._work_done(member, event, now_s)
        else:
            self._left(member, event, now_s)

    def _work_done(self, member: MemberState, event: MemberWorkDone, now_s: float) -> None:
        if self.state.agreement_of(member, event.generation, Phase.COMMITTED) is not None:
            # The member has entered the generation, even if this leader got no report of that.
            ready = ReadinessReported(
                member_id=member.member_id,
                incarnation=member.incarnation,
                generation=event.generation,
            )
            self._attempts.became_ready(member, ready, now_s)
        if event.finished:
            self._removal.finish(member, event.reason, now_s)
        if event.closes and not self.state.end.completing:
            self._removal.complete(member, event.reason, now_s)

    def _left(self, member: MemberState, event: MemberLeft, now_s: float) -> None:
        # A member that joins with its work done does not end the training of the others.
        concerns_all = self.state.running is None or member.is_in(self.state.running)
        if event.completed and member.proposal is not None and member.proposal.stateless:
            # Torchrun's nodes may end at different times.
            self._removal.finish(member, event.reason, now_s)
        elif event.completed and concerns_all and not self.state.end.completing:
            self._removal.complete(member, event.reason, now_s)
        self._removal.remove(
            member,
            f"left: {event.reason}",
            now_s,
            completed=event.completed,
            cause=event.reason or "of its own",
            lost=False,
        )
        if event.failed:
            # A new member would find nothing left to train on, and finish the job.
            self._lifetime.abandon(f"{member.member_id}: left: {event.reason}", now_s)

    def _advance(self, now_s: float) -> None:
        """Take the transitions that the time and the present members allow."""
        self.state.setbacks.release(now_s)
        if self.state.table.draining:
            self._drains.release_overdue(now_s)
        if self.state.end.completing:
            return
        if self.state.deadlines.deadline_s is not None and now_s >= self.state.deadlines.deadline_s:
            self._timeouts.deadline_passed(now_s)
        if self.state.running is None:
            if self.state.stage.phase is not Phase.COLLECT:
                return
            if self._collecting.may_form(now_s):
                self._freeze(self._collecting.chosen(now_s), now_s)
            else:
                self._collecting.hold_for_members(now_s)
        elif self.state.stage.phase in (Phase.RUNNING, Phase.COLLECT):
            self._advance_change(now_s)

    def _advance_change(self, now_s: float) -> None:
        """Begin, drop or carry on a planned change of the running generation."""
        wanted, chosen = self._collecting.change_wanted(now_s)
        if not wanted:
            if self.state.stage.phase is Phase.COLLECT:
                self.state.to(Trigger.CHANGE_DROPPED, "the members that wanted it are gone", now_s)
            return
        if self._pause_keeper.pausing():
            return  # A paused member cannot take part: the change waits until all can.
        if self.state.stage.phase is Phase.RUNNING:
            self.state.to(Trigger.CHANGE_WANTED, wanted, now_s)
        # Wait a little for members that have not proposed yet, and for further drains, since drains
        # mostly arrive together: one stop then serves all of them.
        coming = self.state.table.num_not_proposed > 0 or bool(self.state.table.draining)
        if not coming or limit_passed(self.state.stage.since_s, self.state.limits.gather_s, now_s):
            self._freeze(chosen, now_s)

    def _freeze(self, chosen: list[MemberState], now_s: float) -> None:
        if not self._attempts.freeze(chosen, now_s):
            self._advance(now_s)

    def _asked(
        self,
        member: MemberState,
        event: DrainRequested | MemberPaused | MemberResumed,
        now_s: float,
    ) -> None:
        """Handle a request to drain, pause or resume the member; a drain may be an operator's."""
        match event:
            case DrainRequested():
                self._drains.request_drain(member, event, now_s)
            case MemberPaused():
                self._pause_keeper.begin(member, event, now_s)
            case MemberResumed():
                self._pause_keeper.end(member, event, now_s)
