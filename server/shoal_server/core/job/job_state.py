"""State of a job that all parts of the core share: phase, deadlines, members, agreement, record."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.progress import Progress, Tally
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
from shoal_server.core.membership import refusals
from shoal_server.core.membership.changes import Changes, Story
from shoal_server.core.membership.events import (
    BreakNotice,
    Effect,
    Log,
    Notice,
    PrepareNotice,
    Refusal,
    Refused,
    StopAtNotice,
    Tell,
)
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.membership_table import MembershipTable
from shoal_server.core.membership.phases import Phase, Trigger, after
from shoal_server.core.membership.setbacks import Setbacks


def passed(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + limit_s


@dataclass(kw_only=True)
class Deadlines:
    """None: that limit does not run."""

    deadline_s: float | None = None
    """When the phase is over at the latest."""
    bring_up_over_s: float | None = None
    """Whatever still moves then, the generation is not brought up."""
    first_proposal_s: float | None = None
    """Since when somebody is ready to train."""
    broken_since_s: float | None = None
    """Since when members have been asked to stop."""
    suspect_since_s: float | None = None
    """Since when word of a loss is awaited, after a collective failed."""
    overdue_check_s: float | None = None
    """No member has waited for the join limit before then."""

    def stop(self) -> None:
        """Nothing is waited for any more."""
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.bring_up_over_s = self.overdue_check_s = None

    def postpone(self, by_s: float) -> None:
        """For so long nobody could be told anything."""
        self.deadline_s = _later(self.deadline_s, by_s)
        self.bring_up_over_s = _later(self.bring_up_over_s, by_s)
        self.broken_since_s = _later(self.broken_since_s, by_s)
        self.suspect_since_s = _later(self.suspect_since_s, by_s)
        self.overdue_check_s = _later(self.overdue_check_s, by_s)

    def hold(self, by_s: float) -> None:
        """For so long somebody was paused. Whatever tells of a loss goes on as ever."""
        self.deadline_s = _later(self.deadline_s, by_s)
        self.bring_up_over_s = _later(self.bring_up_over_s, by_s)
        self.broken_since_s = _later(self.broken_since_s, by_s)
        self.overdue_check_s = _later(self.overdue_check_s, by_s)
        self.first_proposal_s = _later(self.first_proposal_s, by_s)


def _later(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


@dataclass(kw_only=True)
class PhaseState:
    """The phase, and why."""

    phase: Phase = Phase.COLLECT
    reason: str = "the job is new"
    since_s: float = 0.0


@dataclass(kw_only=True)
class Tries:
    """What went wrong since a generation last came to run."""

    failures: int = 0
    num_excluded: int = 0
    """Members that were there but could not be trained with; the job does not wait for as many
    again."""
    failed_roster: Roster | None = None
    """The newest that was to be brought up, and was not."""
    changes: Changes = field(default_factory=Changes)
    """Who went and why, and who came: what the next generation is told with."""


@dataclass(kw_only=True)
class End:
    """Whether the job takes nobody in any more."""

    completing: bool = False
    lost: Refusal | None = None
    """Of a job whose state is lost: what everybody is refused with."""
    stopping: str = ""
    """Of a job that was stopped, or is to be once its members have left: why."""


@dataclass(kw_only=True)
class JobState:
    """What the parts of one job share. Each changes what it decides about."""

    spec: JobSpec
    limits: Limits
    stage: PhaseState
    table: MembershipTable
    last_generation: Generation = NO_GENERATION
    running: Roster | None = None
    """The generation that trains, if one does."""
    previous: Roster | None = None
    """The newest roster that was committed: ranks are kept from it."""
    agreement: Agreement | None = None
    """On the roster in PREPARE or COMMITTED."""
    record: Record | None = None
    """The newest committed record: of the generation that runs or is brought up."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    tries: Tries = field(default_factory=Tries)
    end: End = field(default_factory=End)
    setbacks: Setbacks = field(default_factory=Setbacks)
    progress: Progress = field(default_factory=Progress)
    effects: list[Effect] = field(default_factory=list)

    @property
    def tally(self) -> Tally:
        """What people are told of the job's whole life."""
        return self.progress.tally

    @property
    def members(self) -> dict[str, Member]:
        return self.table.members

    @property
    def attempt(self) -> Roster | None:
        """The roster in PREPARE or COMMITTED."""
        return self.agreement.roster if self.agreement is not None else None

    def members_of(self, roster: Roster) -> list[Member]:
        """Those of the roster that are still here, by rank."""
        return self.table.of(roster)

    def agreement_of(
        self, member: Member, generation: Generation, phase: Phase
    ) -> Agreement | None:
        """The attempt under way, if the member is in it and speaks of it where it counts."""
        agreement = self.agreement
        if agreement is None or self.stage.phase is not phase or generation != agreement.generation:
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
        self.deadlines.postpone(by_s)
        self.table.postpone(by_s)
        self.setbacks.postpone(by_s)

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

    @property
    def able(self) -> Collection[Member]:
        """The candidates but for those whose next try is put off.

        Who trains is never among them; and who holds state is tried again at once, once.
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

    def stays(self, member: Member) -> bool:
        """True if the member does not pay for those that come: it trains, or keeps the job."""
        return member.is_in(self.running) or member.keeps_job

    def at_fault(self, members: Iterable[Member]) -> list[Member]:
        """Those of the members that come to others; if none does, those that do not train."""
        outside = [m for m in members if not m.is_in(self.running)]
        return [m for m in outside if not self.stays(m)] or outside

    @property
    def least_members(self) -> int:
        """Members that a roster needs. Those that have done their work are not to be had again."""
        return max(1, self.spec.min_members - len(self.table.finished))

    def lacks_state(self, members: Iterable[Member]) -> bool:
        """Whether a generation of these could not go on from where the job had come to."""
        if self.running is not None or self.end.completing or not self.progress.has_trained:
            return False
        return not any(m.holds_state or (m.proposal and m.proposal.stateless) for m in members)

    def refuse_if_over(self) -> None:
        """Raise for a job that takes nobody in any more."""
        if self.end.lost is not None:
            raise Refused(self.end.lost)
        if self.stage.phase is Phase.STOPPED:
            raise Refused(refusals.stopped(self.spec.job, "is stopped", self.end.stopping))
        if self.stage.phase is Phase.FAILED:
            raise Refused(refusals.stopped(self.spec.job, "has failed", self.stage.reason))
        if self.stage.phase is Phase.FINISHED or self.end.completing:
            raise Refused(refusals.finished(self.spec.job, self.stage.reason))

    def do(self, effect: Effect) -> None:
        self.effects.append(effect)

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def tell(self, member: Member, notice: Notice) -> None:
        self.do(Tell(member_id=member.member_id, incarnation=member.incarnation, notice=notice))

    def log(
        self,
        kind: str,
        reason: str,
        member: Member | None = None,
        *,
        story: Story | None = None,
    ) -> None:
        member_id = member.member_id if member else ""
        generation = self.last_generation
        self.do(
            Log(
                kind=kind,
                reason=reason,
                member_id=member_id,
                generation=generation,
                story=story,
            )
        )

    def to(self, trigger: Trigger, reason: str, now_s: float) -> None:
        self.stage = PhaseState(
            phase=after(self.stage.phase, trigger), reason=reason, since_s=now_s
        )
        if self.stage.phase is Phase.COLLECT:
            self.deadlines.overdue_check_s = now_s + self.limits.join_s
        self.log(f"phase_{self.stage.phase.value}", reason)

    def break_notice(self, generation: Generation) -> BreakNotice:
        return BreakNotice(reason=self.stage.reason, generation=generation, lost_member_ids=())

    def prepare_notice(self, agreement: Agreement) -> PrepareNotice:
        return PrepareNotice(
            reason=self.stage.reason, roster=agreement.roster, digest=agreement.digest
        )

    @staticmethod
    def stop_notice(generation: Generation, step: Step) -> StopAtNotice:
        reason = f"generation {generation} starts at step {step}"
        return StopAtNotice(reason=reason, generation=generation, step=step)

    def record_of(
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
