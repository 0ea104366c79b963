"""What a job's membership keeps, and how it speaks: the part of `Job` that decides nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.progress import Progress
from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Conflict,
    Generation,
    JobSpec,
    Record,
    Roster,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership.attendance import Attendance
from shoal_server.core.membership.events import (
    BreakNotice,
    Effect,
    Log,
    Notice,
    OutcomeNotice,
    PausesNotice,
    PrepareNotice,
    Refusal,
    RunningNotice,
    StopAtNotice,
    Tell,
)
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.pauses import Pause, told
from shoal_server.core.membership.phases import Phase, Trigger, after
from shoal_server.core.membership.setbacks import Setbacks


@dataclass(kw_only=True)
class JobState:
    """State of one job. Its fields are read by the edge and changed only in the core."""

    spec: JobSpec
    limits: Limits
    digest_of: Callable[[Roster], str]
    phase: Phase = Phase.COLLECT
    reason: str = "the job is new"
    last_generation: Generation = NO_GENERATION
    running: Roster | None = None
    """The generation that trains, if one does."""
    previous: Roster | None = None
    """The newest roster that was committed: ranks are kept from it."""
    agreement: Agreement | None = None
    """On the roster in PREPARE or COMMITTED."""
    record: Record | None = None
    """The newest committed record: of the generation that runs or is brought up."""
    phase_since_s: float = 0.0
    first_proposal_s: float | None = None
    deadline_s: float | None = None
    broken_since_s: float | None = None
    suspect_since_s: float | None = None
    overdue_check_s: float | None = None
    """No member has waited for the join limit before then."""
    failures: int = 0
    num_excluded: int = 0
    """Members that were there but could not be trained with; the job does not wait for as many
    again."""
    completing: bool = False
    setbacks: Setbacks = field(default_factory=Setbacks)
    failed_roster: Roster | None = None
    """The newest that was to be brought up, and was not."""
    progress: Progress = field(default_factory=Progress)
    lost: Refusal | None = None
    """Of a job whose state is lost: what everybody is refused with."""
    attendance: Attendance = field(init=False)
    _effects: list[Effect] = field(default_factory=list)
    _told_paused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.attendance = Attendance(limits=self.limits)

    @property
    def members(self) -> dict[str, Member]:
        return self.attendance.members

    @property
    def attempt(self) -> Roster | None:
        """The roster in PREPARE or COMMITTED."""
        return self.agreement.roster if self.agreement is not None else None

    def members_of(self, roster: Roster) -> list[Member]:
        """Those of the roster that are still here, by rank."""
        return self.attendance.of(roster)

    def agreement_of(
        self, member: Member, generation: Generation, phase: Phase
    ) -> Agreement | None:
        """The attempt under way, if the member is in it and speaks of it where it counts."""
        agreement = self.agreement
        if agreement is None or self.phase is not phase or generation != agreement.generation:
            return None
        return agreement if member.is_in(agreement.roster) else None

    def concerned(self, roster: Roster) -> list[Member]:
        """Who has to hear how the attempt ends: its members, and those who leave by it."""
        members = self.members_of(roster)
        if self.running is None or not self.running.synchronous:
            return members
        return members + [m for m in self.members_of(self.running) if not m.is_in(roster)]

    def heard_of_step(self, member_id: str, incarnation: str, step: Step) -> None:
        """A heartbeat: one that trains has so many steps behind it. Costs next to nothing."""
        member = self.members.get(member_id)
        if member is None or member.incarnation != incarnation:
            return
        # One that is on its way in may come with steps of another run.
        if member.entered > NO_GENERATION and self._trains_together(member):
            self.progress.heard_of(step)

    def _trains_together(self, member: Member) -> bool:
        rosters = (self.running, self.previous)
        return any(member.is_in(r) for r in rosters if r is not None and r.synchronous)

    def postpone(self, by_s: float) -> None:
        """Move every limit that runs: for so long nobody could be told anything.

        What was decided waited to become durable, so no member is late for not acting on it.
        """
        for name in ("deadline_s", "broken_since_s", "suspect_since_s", "overdue_check_s"):
            since_s: float | None = getattr(self, name)
            if since_s is not None:
                setattr(self, name, since_s + by_s)
        self.attendance.postpone(by_s)
        self.setbacks.postpone(by_s)

    # --- pauses ---

    def pausing(self) -> list[tuple[Member, Pause]]:
        """Who is paused, of those whom others wait for."""
        return [each for each in self.attendance.pauses if self._is_waited_for(each[0])]

    def _is_waited_for(self, member: Member) -> bool:
        if self.completing or not self.attempt_is_synchronous:
            return False
        if self.running is None:
            return member.is_in(self.attempt or self.previous) or self.previous is None
        return member.is_in(self.running) or member.is_in(self.attempt)

    @property
    def attempt_is_synchronous(self) -> bool:
        """Whether members wait for each other, in what runs or is to; True while nothing is."""
        roster = self.running or self.attempt or self.previous
        return roster is None or roster.synchronous

    def rank_of(self, member: Member) -> int | None:
        """The member's rank in what runs, is to run or ran last."""
        rosters = (self.running, self.attempt, self.previous)
        roster = next((r for r in rosters if r is not None and member.is_in(r)), None)
        return roster.ranks[member.member_id] if roster is not None else None

    def why_paused(self, now_s: float | None = None) -> str:
        """Whom all wait for, and until when at most; empty while nobody is paused."""
        pausing = self.pausing()
        texts = [told(member, self.rank_of(member), pause, now_s) for member, pause in pausing[:3]]
        more = [f"and {len(pausing) - 3} more"] if len(pausing) > 3 else []
        return "; ".join(texts + more)

    def _keep_limits(self, now_s: float) -> None:
        """Before anything is looked at: what passed while somebody was paused counts for no limit.

        Whatever tells of a loss goes on as ever: broken streams, halts, a collective that failed.
        """
        by_s = self.attendance.pauses.hold(now_s, held=bool(self.pausing()))
        if not by_s:
            return
        for name in ("deadline_s", "broken_since_s", "overdue_check_s", "first_proposal_s"):
            since_s: float | None = getattr(self, name)
            if since_s is not None:
                setattr(self, name, since_s + by_s)
        self.attendance.postpone_drains(by_s)

    def _tell_pauses(self, now_s: float) -> None:
        """After anything that may change it: tell all whom they wait for, if that is news."""
        paused = tuple(sorted(member.member_id for member, _ in self.pausing()))
        self.attendance.pauses.hold(now_s, held=bool(paused))
        if paused == self._told_paused:
            return
        self._told_paused = paused
        self._tell_all_pauses()

    def _tell_all_pauses(self) -> None:
        """Let the limits of all members begin anew, or stand still while somebody is paused."""
        notice = self._pauses_notice()
        for member in self.members.values():
            self._tell(member, notice)

    def _pauses_notice(self) -> PausesNotice:
        reason = self.why_paused() or self.reason
        return PausesNotice(reason=reason, member_ids=self._told_paused)

    # --- effects ---

    def _do(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _tell(self, member: Member, notice: Notice) -> None:
        self._do(Tell(member_id=member.member_id, incarnation=member.incarnation, notice=notice))

    def _log(self, kind: str, reason: str, member: Member | None = None) -> None:
        member_id = member.member_id if member else ""
        generation = self.last_generation
        self._do(Log(kind=kind, reason=reason, member_id=member_id, generation=generation))

    def _to(self, trigger: Trigger, reason: str, now_s: float) -> None:
        self.phase = after(self.phase, trigger)
        self.phase_since_s, self.reason = now_s, reason
        if self.phase is Phase.COLLECT:
            self.overdue_check_s = now_s + self.limits.join_s
        self._log(f"phase_{self.phase.value}", reason)

    def _tell_again(self, member: Member) -> None:
        """What a member that was away may have missed and has to act on."""
        agreement, running = self.agreement, self.running
        attempted = agreement is not None and member.is_in(agreement.roster)
        trains = running is not None and member.is_in(running)
        if agreement is not None and attempted and self.phase is Phase.PREPARE:
            self._tell(member, self._prepare_notice(agreement))
        elif agreement is not None and self.phase is Phase.COMMITTED and (attempted or trains):
            assert self.record is not None
            self._tell(member, OutcomeNotice(reason=self.record.reason, record=self.record))
            if agreement.stop_at is not None:
                self._tell(member, self._stop_notice(agreement.generation, agreement.stop_at))
        elif running is not None and trains:
            self._tell(member, RunningNotice(reason=self.reason, generation=running.generation))
        elif not member.settled:
            # It missed the break of the last generation it was part of.
            self._tell(member, self._break_notice(self.last_generation))
        if self._told_paused:
            self._tell(member, self._pauses_notice())

    def _break_notice(self, generation: Generation) -> BreakNotice:
        return BreakNotice(reason=self.reason, generation=generation, lost_member_ids=())

    def _prepare_notice(self, agreement: Agreement) -> PrepareNotice:
        return PrepareNotice(reason=self.reason, roster=agreement.roster, digest=agreement.digest)

    @staticmethod
    def _stop_notice(generation: Generation, step: Step) -> StopAtNotice:
        reason = f"generation {generation} starts at step {step}"
        return StopAtNotice(reason=reason, generation=generation, step=step)

    def _record(
        self, verdict: Verdict, reason: str, now_s: float, conflicts: tuple[Conflict, ...] = ()
    ) -> Record:
        agreement = self.agreement
        assert agreement is not None
        return Record(
            job=self.spec.job,
            roster=agreement.roster,
            verdict=verdict,
            reason=reason,
            digest=agreement.digest,
            decided_s=now_s,
            conflicts=conflicts,
        )
