"""State of one job, and what can be asked of it."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.progress import JobProgress, LifetimeFigures
from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Conflict,
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership import refusals
from shoal_server.core.membership.changes import ChangeSummary, PendingChanges
from shoal_server.core.membership.events import (
    BreakNotice,
    Effect,
    EventRefused,
    LogJobEvent,
    Notice,
    PrepareNotice,
    Refusal,
    SendNotice,
    StopAtNotice,
)
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.membership_table import MembershipTable
from shoal_server.core.membership.pauses import MAX_NAMES, Pause, PausedMembers, pause_in_words
from shoal_server.core.membership.phases import OVER, Phase, Trigger, next_phase
from shoal_server.core.membership.setbacks import Setbacks


def limit_passed(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + limit_s


@dataclass(kw_only=True)
class Deadlines:
    """Time limits of a job. None: the limit does not run."""

    deadline_s: float | None = None
    """Latest end of the phase, moved on by progress, or of the back-off in ABORTED."""
    bring_up_over_s: float | None = None
    """Latest end of the bring-up."""
    first_proposal_s: float | None = None
    broken_since_s: float | None = None
    """Time of the notices to stop after a break."""
    suspect_since_s: float | None = None
    """Time of a failed collective, while the report of a loss is awaited."""
    short_since_s: float | None = None
    """Time since which the job has lacked members, through failed attempts too."""
    overdue_check_s: float | None = None
    """Next check for members that have waited too long."""

    def stop(self) -> None:
        """Stop all limits except `first_proposal_s`."""
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.bring_up_over_s = self.overdue_check_s = self.short_since_s = None

    def postpone(self, by_s: float) -> None:
        """Move the limits by a time in which no member could be notified."""
        self.deadline_s = _later(self.deadline_s, by_s)
        self.bring_up_over_s = _later(self.bring_up_over_s, by_s)
        self.broken_since_s = _later(self.broken_since_s, by_s)
        self.suspect_since_s = _later(self.suspect_since_s, by_s)
        self.overdue_check_s = _later(self.overdue_check_s, by_s)
        self.short_since_s = _later(self.short_since_s, by_s)

    def extend(self, by_s: float) -> None:
        """Move the limits by the time of a pause, except the one for the report of a loss."""
        self.deadline_s = _later(self.deadline_s, by_s)
        self.bring_up_over_s = _later(self.bring_up_over_s, by_s)
        self.broken_since_s = _later(self.broken_since_s, by_s)
        self.overdue_check_s = _later(self.overdue_check_s, by_s)
        self.short_since_s = _later(self.short_since_s, by_s)
        self.first_proposal_s = _later(self.first_proposal_s, by_s)


def _later(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


@dataclass(kw_only=True)
class AttemptCounts:
    """Failures and changes since a generation last began to run."""

    failures: int = 0
    """Number of aborted attempts."""
    num_excluded: int = 0
    """Ready members that were left out; the job does not wait for others in their place."""
    is_after_break: bool = False
    """True if the running generation broke."""
    failed_roster: GenerationRoster | None = None
    """Newest roster with a failed bring-up."""
    changes: PendingChanges = field(default_factory=PendingChanges)


@dataclass(kw_only=True)
class JobEnd:
    """End of a job. If any of these is set, no member is allowed to join."""

    completing: bool = False
    """True once the work is done, a member has closed the job, or its state is lost."""
    lost: Refusal | None = None
    """Refusal for every member once the job's state is lost."""
    stopping: str = ""
    """Reason why an operator stopped the job, which is over once its members have left."""


@dataclass(kw_only=True)
class JobState:
    """State of one job, changed by the modules of this package."""

    spec: JobSpec
    limits: Limits
    digest_of: Callable[[GenerationRoster], str]
    size_problem: Callable[[GenerationRoster], str] = lambda roster: ""
    """Returns why etcd would not accept a roster's record; empty if it would."""
    phase: Phase = Phase.COLLECT
    reason: str = "the job is new"
    phase_since_s: float = 0.0
    table: MembershipTable = field(init=False)
    last_generation: Generation = NO_GENERATION
    running: GenerationRoster | None = None
    """The generation that trains, if any."""
    previous: GenerationRoster | None = None
    """Newest committed roster, or the running one after an aborted planned change. Members keep its
    ranks."""
    agreement: Agreement | None = None
    record: GenerationRecord | None = None
    """Newest committed record; its generation may be over."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    tries: AttemptCounts = field(default_factory=AttemptCounts)
    end: JobEnd = field(default_factory=JobEnd)
    setbacks: Setbacks = field(default_factory=Setbacks)
    progress: JobProgress = field(default_factory=JobProgress)
    announced: PausedMembers = field(default_factory=PausedMembers)
    """Paused members at the last notice."""
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = MembershipTable(limits=self.limits)
        self.tally.begun_s = self.tally.idle_since_s = self.phase_since_s

    @property
    def tally(self) -> LifetimeFigures:
        """Figures over the job's whole life."""
        return self.progress.tally

    @property
    def is_completing(self) -> bool:
        """True once the job admits no further members."""
        return self.end.completing

    @property
    def loss_refusal(self) -> Refusal | None:
        """Refusal for every member once the job's state is lost; None before."""
        return self.end.lost

    @property
    def stop_reason(self) -> str:
        """Reason why the job was or is being stopped; empty for other jobs."""
        return self.end.stopping

    @property
    def suspected(self) -> GenerationRoster | None:
        """The running generation while a failed collective of it is unexplained."""
        return self.running if self.deadlines.suspect_since_s is not None else None

    @property
    def members(self) -> dict[str, MemberState]:
        return self.table.members

    @property
    def attempt(self) -> GenerationRoster | None:
        """The roster in PREPARE or COMMITTED, if any."""
        return self.agreement.roster if self.agreement is not None else None

    def members_of(self, roster: GenerationRoster) -> list[MemberState]:
        """Present members of the roster, by rank."""
        return self.table.members_of(roster)

    def agreement_of(self, member: MemberState, generation: Generation) -> Agreement | None:
        """Return the current attempt if it is of this generation and with the member."""
        agreement = self.agreement
        if agreement is None or generation != agreement.generation:
            return None
        return agreement if member.is_in(agreement.roster) else None

    def members_to_notify(self, roster: GenerationRoster) -> list[MemberState]:
        """Members of the attempt's roster, and of a running synchronous generation."""
        members = self.members_of(roster)
        if self.running is None or not self.running.synchronous:
            return members
        return members + [m for m in self.members_of(self.running) if not m.is_in(roster)]

    def note_step(self, member_id: str, incarnation: str, step: Step) -> None:
        """Note a heartbeat's step, in constant time. Ignored for another incarnation, or outside of
        a synchronous generation that the member has entered."""
        member = self.members.get(member_id)
        if member is None or member.incarnation != incarnation:
            return
        # Before its first generation, a member may count another run's steps.
        if member.entered > NO_GENERATION and self._trains_together(member):
            self.progress.note_reached(step)

    def _trains_together(self, member: MemberState) -> bool:
        rosters = (self.running, self.previous)
        return any(member.is_in(r) for r in rosters if r is not None and r.synchronous)

    def postpone(self, by_s: float) -> None:
        """Move limits by a time in which no member could be notified: decisions could not become
        durable, so no member is late.

        The limits of pauses, halts and the last call are not moved.
        """
        self.deadlines.postpone(by_s)
        self.table.postpone(by_s)
        self.setbacks.postpone(by_s)

    @property
    def attempt_is_synchronous(self) -> bool:
        """True if members wait for each other in the running generation, or else the attempt or the
        last one; True before the first."""
        roster = self.running or self.attempt or self.previous
        return roster is None or roster.synchronous

    def rank_of(self, member: MemberState) -> int | None:
        """Rank in the running generation, or else the attempt or the last one, if any."""
        rosters = (self.running, self.attempt, self.previous)
        roster = next((r for r in rosters if r is not None and member.is_in(r)), None)
        return roster.ranks[member.member_id] if roster is not None else None

    def pausing(self) -> list[tuple[MemberState, Pause]]:
        """Paused members that other members wait for."""
        return [each for each in self.table.pauses if self._is_waited_for(each[0])]

    def _is_waited_for(self, member: MemberState) -> bool:
        if not self.attempt_is_synchronous:
            return False
        if self.running is None:
            return self.previous is None or member.is_in(self.attempt or self.previous)
        return member.is_in(self.running) or member.is_in(self.attempt)

    def why_paused(self, now_s: float | None = None) -> str:
        """Name up to three paused members that others wait for, with their limits at `now_s`."""
        pausing = self.pausing()
        texts = [
            pause_in_words(member, self.rank_of(member), pause, now_s)
            for member, pause in pausing[:MAX_NAMES]
        ]
        num_more = len(pausing) - len(texts)
        more = [f"and {num_more} more"] if num_more else []
        return "; ".join(texts + more)

    @property
    def eligible(self) -> Collection[MemberState]:
        """Candidates that may be in a roster now: all but those that are put off.

        A member that trains is never put off. A member that holds state tries again at once after
        its first own failure, unless it had a shared one.
        """
        candidates, setbacks = self.table.candidates, self.setbacks
        if not any(setbacks.waits(name) for name in setbacks):
            return candidates.values()
        return [
            m
            for m in candidates.values()
            if not setbacks.waits(m.member_id)
            or m.is_in(self.running)
            or (m.holds_state and setbacks.is_first(m.member_id))
        ]

    def stays(self, member: MemberState) -> bool:
        """True if the member trains or has `keeps_job`: newcomers are left out first."""
        return member.is_in(self.running) or member.keeps_job

    def suspects_of(self, members: Iterable[MemberState]) -> list[MemberState]:
        """Return the members to refuse with their roster: those that neither train nor have
        `keeps_job`, or else all that do not train."""
        outside = [m for m in members if not m.is_in(self.running)]
        return [m for m in outside if not self.stays(m)] or outside

    @property
    def min_roster_size(self) -> int:
        """Number of members that a roster needs."""
        return max(1, self.spec.min_members - len(self.table.finished))

    def lacks_state(self, members: Iterable[MemberState]) -> bool:
        """True if a generation of these members could not continue from the step reached. False
        while a generation runs, in a completing job, and before the job has trained."""
        if self.running is not None or self.is_completing or not self.progress.has_trained:
            return False
        return not any(m.holds_state or (m.proposal and m.proposal.stateless) for m in members)

    def refuse_if_over(self) -> None:
        """Raise EventRefused if the job is over or completes."""
        if self.loss_refusal is not None:
            raise EventRefused(self.loss_refusal)
        if self.phase is Phase.STOPPED:
            raise EventRefused(refusals.stopped(self.spec.job, "is stopped", self.stop_reason))
        if self.phase is Phase.FAILED:
            raise EventRefused(refusals.stopped(self.spec.job, "has failed", self.reason))
        if self.phase is Phase.FINISHED or self.is_completing:
            raise EventRefused(refusals.finished(self.spec.job, self.reason))

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def pop_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def notify_member(self, member: MemberState, notice: Notice) -> None:
        self.emit(
            SendNotice(member_id=member.member_id, incarnation=member.incarnation, notice=notice)
        )

    def log(
        self,
        kind: str,
        reason: str,
        member: MemberState | None = None,
        *,
        story: ChangeSummary | None = None,
    ) -> None:
        member_id = member.member_id if member else ""
        generation = self.last_generation
        self.emit(
            LogJobEvent(
                kind=kind,
                reason=reason,
                member_id=member_id,
                generation=generation,
                summary=story,
            )
        )

    def apply_trigger(self, trigger: Trigger, reason: str, now_s: float) -> None:
        """Move to the phase that the trigger leads to, and log it."""
        was_over, self.phase = self.phase in OVER, next_phase(self.phase, trigger)
        if self.phase in OVER:
            self.tally.end_idle(now_s)
        elif was_over:
            # Since the job's end.
            self.tally.begin_idle(self.phase_since_s)
        self.reason, self.phase_since_s = reason, now_s
        if self.phase is Phase.COLLECT:
            self.deadlines.overdue_check_s = now_s + self.limits.join_s
        self.log(f"phase_{self.phase.value}", reason)

    def break_notice(self, generation: Generation) -> BreakNotice:
        return BreakNotice(reason=self.reason, generation=generation, lost_member_ids=())

    def prepare_notice(self, agreement: Agreement) -> PrepareNotice:
        return PrepareNotice(reason=self.reason, roster=agreement.roster, digest=agreement.digest)

    @staticmethod
    def stop_notice(generation: Generation, step: Step) -> StopAtNotice:
        reason = f"generation {generation} starts at step {step}"
        return StopAtNotice(reason=reason, generation=generation, step=step)

    def record_of(
        self, verdict: Verdict, reason: str, now_s: float, conflicts: tuple[Conflict, ...] = ()
    ) -> GenerationRecord:
        agreement = self.agreement
        assert agreement is not None
        return GenerationRecord(
            job=self.spec.job,
            roster=agreement.roster,
            verdict=verdict,
            reason=reason,
            digest=agreement.digest,
            decided_s=now_s,
            conflicts=conflicts,
        )
