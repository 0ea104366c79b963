"""Random events in any order, stale ones too: the core refuses or accepts each.

The job's state stays consistent.
"""

import copy
import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.members.job_world import digest_of

from shoal_proto.incarnation import new_incarnation
from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    MemberInfo,
    Proposal,
    Step,
    Verdict,
)
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.phases import Phase as JobPhase

NUM_EXAMPLES = int(os.environ.get("SHOAL_STATEFUL_EXAMPLES", "100"))
NUM_STEPS = 40
MAX_TICKS_AT_ONCE = 5

SPEC = JobSpec(job="j", min_members=1, max_members=3, desired_members=2)
NAMES = st.sampled_from("abcd")
STARTS = st.integers(1, 2)
STEPS = st.integers(0, 9)
BACK = st.integers(0, 2)
"""Age of the newest generation that a member knows, in generations; 0 is the current one."""
SHARED = {"schema": "s1"}
FIELDS = st.sampled_from([SHARED, SHARED, SHARED, {"schema": "s2"}])


INCARNATIONS = {
    (name, start): new_incarnation(10 * start + position)
    for start in (1, 2)
    for position, name in enumerate("abcd")
}


def who(name: str, start: int) -> dict[str, str]:
    return {"member_id": name, "incarnation": INCARNATIONS[name, start]}


class JobMachine(RuleBasedStateMachine):
    """The job, its verdicts on each generation, and the incarnations that it has expelled."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.job = Job(spec=SPEC, limits=Limits(), digest_of=digest_of)
        self.verdicts: dict[int, list[Verdict]] = {}
        self.expelled: set[str] = set()

    # --- events ---

    def submit(self, event: events.MemberEvent) -> None:
        before, fenced = copy.deepcopy(self.job), set(self.expelled)
        try:
            self.take(self.job.handle(event, self.now_s))
        except events.EventRefused:
            assert self.job == before, f"refused, but the job changed: {event}"
        else:
            assert event.incarnation not in fenced, (
                f"accepted from an expelled incarnation: {event}"
            )

    def take(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, events.WriteGeneration):
                generation = effect.record.roster.generation
                self.verdicts.setdefault(generation, []).append(effect.record.verdict)
            elif isinstance(effect, events.ExpelMember):
                self.expelled.add(effect.incarnation)

    def generation(self, back: int) -> Generation:
        return Generation(max(self.job.last_generation - back, 0))

    @initialize(members=st.sampled_from(["", "ab", "ab", "abc"]), runs=st.booleans())
    def begin(self, members: str, runs: bool) -> None:
        """Start most examples with a generation: random events alone seldom form one."""
        for name in members:
            self.attend(name, 1)
            self.propose(name, 1, 0, SHARED)
        self.all_answer()
        if runs:
            self.all_ready()

    @rule(name=NAMES, start=STARTS)
    def attend(self, name: str, start: int) -> None:
        self.submit(events.MemberJoined(**who(name, start), spec=SPEC, info=MemberInfo()))

    @rule(name=NAMES, start=STARTS, step=STEPS, fields=FIELDS)
    def propose(self, name: str, start: int, step: int, fields: dict[str, str]) -> None:
        proposal = Proposal(fields=fields, step=Step(step), has_state=step > 0)
        self.submit(events.TrainingProposed(**who(name, start), proposal=proposal))

    @rule(name=NAMES, start=STARTS, back=BACK, rejects=st.integers(0, 5))
    def answer(self, name: str, start: int, back: int, rejects: int) -> None:
        rejection = events.Rejection(field="custom", seen="1", expected="2")
        attempt = self.job.attempt
        unreachable = (("a", "refused"),) if rejects == 1 and name != "a" else ()
        event = events.RosterAnswered(
            **who(name, start),
            generation=self.generation(back),
            digest=digest_of(attempt) if attempt is not None else "",
            rejections=(rejection,) if rejects == 0 else (),
            unreachable=unreachable,
        )
        self.submit(event)

    @precondition(lambda self: self.job.phase is JobPhase.PREPARE)
    @rule()
    def all_answer(self) -> None:
        for name in "abcd":
            member = self.job.members.get(name)
            if member is not None:
                self.answer(
                    name, 1 if member.incarnation == who(name, 1)["incarnation"] else 2, 0, 5
                )

    @rule(name=NAMES, start=STARTS, back=BACK)
    def ready(self, name: str, start: int, back: int) -> None:
        event = events.ReadinessReported(**who(name, start), generation=self.generation(back))
        self.submit(event)

    @precondition(lambda self: self.job.phase is JobPhase.COMMITTED)
    @rule()
    def all_ready(self) -> None:
        for member in list(self.job.members.values()):
            identity = {"member_id": member.member_id, "incarnation": member.incarnation}
            self.submit(events.ReadinessReported(**identity, generation=self.job.last_generation))

    @rule(name=NAMES, start=STARTS, back=BACK, step=STEPS)
    def offer(self, name: str, start: int, back: int, step: int) -> None:
        generation = self.generation(back)
        self.submit(
            events.NextStepReached(**who(name, start), generation=generation, next_step=Step(step))
        )

    @rule(name=NAMES, start=STARTS, back=BACK, step=STEPS)
    def settle(self, name: str, start: int, back: int, step: int) -> None:
        event = events.StepReported(
            **who(name, start), step=Step(step), has_state=step > 0, left=self.generation(back)
        )
        self.submit(event)

    @rule(name=NAMES, start=STARTS, back=BACK)
    def report_break(self, name: str, start: int, back: int) -> None:
        self.submit(
            events.BreakReported(
                **who(name, start), generation=self.generation(back), error="reset"
            )
        )

    @rule(name=NAMES, start=STARTS, kind=st.integers(0, 5))
    def lose(self, name: str, start: int, kind: int) -> None:
        identity = who(name, start)
        kinds: list[events.MemberEvent] = [
            events.MemberLost(**identity, reason="exit"),
            events.StreamDisconnected(**identity),
            events.ProcessHalted(**identity),
            events.ProcessContinued(**identity),
            events.DrainRequested(**identity, reason="spot notice"),
            events.MemberLeft(**identity, completed=False, reason="left"),
        ]
        self.submit(kinds[kind])

    @rule(name=NAMES, start=STARTS, rare=st.integers(0, 9))
    def complete(self, name: str, start: int, rare: int) -> None:
        if rare == 0:
            self.submit(events.MemberLeft(**who(name, start), completed=True, reason="done"))

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 1.1, 11.0, 31.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass, and call `tick` at each of the job's deadlines, as its actor does."""
        end_s, ticks = self.now_s + seconds, 0
        while (deadline_s := self.job.next_deadline_s()) is not None and deadline_s <= end_s:
            ticks = ticks + 1 if deadline_s <= self.now_s else 0
            reason = f"{self.job.phase}: {self.job.reason}"
            assert ticks < MAX_TICKS_AT_ONCE, f"it ticks without end; {reason}"
            self.now_s = max(self.now_s, deadline_s)
            self.take(self.job.tick(self.now_s))
        self.now_s = end_s

    # --- invariants ---

    @invariant()
    def each_generation_is_decided_once(self) -> None:
        for generation, verdicts in self.verdicts.items():
            assert verdicts in (
                [Verdict.COMMITTED],
                [Verdict.ABORTED],
                [Verdict.COMMITTED, Verdict.ABORTED],
            ), f"generation {generation}: {verdicts}"

    @invariant()
    def rosters_are_consistent(self) -> None:
        job = self.job
        for roster in (job.running, job.attempt):
            if roster is not None:
                assert [e.rank for e in roster.entries] == list(range(len(roster.entries)))
                assert len(roster.entries) <= SPEC.max_members
                is_complete = job.is_completing or len(job.members_of(roster)) == len(
                    roster.entries
                )
                assert is_complete, "a lost member is in it"
        if job.running is not None:
            assert self.verdicts[job.running.generation] == [Verdict.COMMITTED]
        if job.phase is JobPhase.RUNNING:
            assert job.running is not None
            assert job.attempt is None

    @invariant()
    def the_table_agrees_with_its_members(self) -> None:
        table = self.job.table
        every_member = table.members.values()
        assert set(table.candidates) == {
            m.member_id for m in every_member if m.proposal is not None and m.drain.since_s is None
        }
        assert set(table.draining) == {
            m.member_id for m in every_member if m.drain.since_s is not None
        }
        assert {m.member_id for m in table.unsettled()} == {
            m.member_id for m in every_member if not m.settled
        }
        assert set(table._disconnected) == {
            m.member_id for m in every_member if m.disconnected_s is not None
        }
        assert set(table._halted) == {m.member_id for m in every_member if m.halted_s is not None}
        firsts = [m.disconnected_s for m in table._disconnected.values()]
        assert firsts == sorted(firsts, key=lambda at_s: at_s or 0.0)

    @invariant()
    def every_wait_has_a_deadline(self) -> None:
        """A deadline is set if the job waits for members and no generation runs."""
        job = self.job
        waits = job.phase in (JobPhase.PREPARE, JobPhase.COMMITTED, JobPhase.ABORTED)
        unsettled = job.phase is JobPhase.COLLECT and not job.table.all_settled
        if not job.is_completing and (waits or (unsettled and job.running is None)):
            assert job.next_deadline_s() is not None, f"{job.phase}: {job.reason}"


TestJob = JobMachine.TestCase
TestJob.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=NUM_STEPS,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
