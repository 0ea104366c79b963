"""Jobs that have trained never start from initial values: without their state they are lost."""

from dataclasses import replace

from support.members.job_world import World, digest_of, training

from shoal_proto.incarnation import new_incarnation
from shoal_server.core.generations.progress import JobProgress
from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    MemberInfo,
    Proposal,
    StateAction,
    Step,
    Verdict,
)
from shoal_server.core.job.job import Job
from shoal_server.core.job.restore import SavedJob, restored
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.events import RefusalKind
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import Phase


def kill(w: World, *names: str) -> None:
    for name in names:
        w.kill(name, seen_by_launcher=True)


def test_a_job_without_its_state_is_lost_and_refusals_have_its_step() -> None:
    """The members were killed and restarted; each refusal also has what to do."""
    w = training("a", "b")
    w.train(7)
    w.beat("a", 7)
    kill(w, "a", "b")
    fresh = [w.join("a"), w.join("b")]
    w.run(2.0)
    assert w.job.phase is Phase.LOST
    for member in fresh:
        assert member.refused is not None
        assert member.refused.kind == RefusalKind.STATE_LOST
        assert "step 7" in member.refused.what
        assert "generation 1" in member.refused.what
        assert "--fresh" in member.refused.fix
        assert "checkpoints=" in member.refused.fix
    assert w.written[2][0].verdict is Verdict.ABORTED
    assert not w.job.members


def test_a_later_joiner_of_a_lost_job_gets_the_same_refusal() -> None:
    """The loss is kept with the job, not with the members that found it."""
    w = training("a", "b")
    w.beat("a", 3)
    kill(w, "a", "b")
    w.join("a")
    w.run(w.job.limits.last_call_s + 2.0)
    late = w.join("x")
    w.run(w.now_s + 1.0)
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.STATE_LOST
    assert "step 3" in late.refused.what


def test_a_standby_does_not_start_over_when_the_last_survivor_is_lost() -> None:
    """A standby that joined before the loss has no state, and is refused."""
    w = World(JobSpec(job="j", max_members=1))
    w.join("a")
    w.run(1.0)
    w.train(5)
    spare = w.join("x")
    w.run(2.0)
    kill(w, "a")
    w.run(w.now_s + w.job.limits.last_call_s + 1.0)
    assert spare.refused is not None
    assert spare.refused.kind == RefusalKind.STATE_LOST


def test_a_generation_that_ran_has_trained_although_no_step_was_reported() -> None:
    """Steps may be faster than heartbeats: the job cannot exclude that one was taken."""
    w = training("a", "b")
    kill(w, "a", "b")
    w.join("a")
    fresh = w.join("b")
    w.run(2.0)
    assert fresh.refused is not None
    assert "its first steps" in fresh.refused.what


def test_a_running_generation_is_durable_before_members_are_notified() -> None:
    """A new leader finds in etcd that the job has trained. Later generations need no further
    write."""
    w = World(JobSpec(job="j", desired_members=1))
    effects: list[events.Effect] = []
    w.apply, deliver = lambda each: (effects.extend(each), deliver(each))[1], w.apply
    w.join("a")
    w.run(1.0)
    kinds = [type(e.notice) if isinstance(e, events.SendNotice) else type(e) for e in effects]
    assert kinds.index(events.SaveJobRecord) < kinds.index(events.RunningNotice)
    w.join("b")
    w.run(2.0)
    assert w.job.last_generation == 2
    assert sum(isinstance(e, events.SaveJobRecord) for e in effects) == 1


def test_the_end_of_a_generation_that_never_ran_loses_nothing() -> None:
    """A generation that was committed but not brought up has taken no step, so the next one has
    initial values."""
    w = World(JobSpec(job="j", desired_members=2))
    w.bring_up = lambda member, generation: None  # type: ignore[method-assign]
    w.join("a")
    w.join("b")
    w.run(1.0)
    assert w.job.phase is Phase.COMMITTED
    kill(w, "a", "b")
    del w.bring_up
    w.join("a")
    w.join("b")
    w.run(2.0)
    assert w.is_running()
    assert w.job.running is not None
    assert {e.state for e in w.job.running.entries} == {StateAction.INITIAL}


def test_a_job_continues_from_a_checkpoint_that_all_members_have() -> None:
    """The checkpoint may be older than the last step."""
    w = training("a", "b")
    w.beat("a", 500)
    kill(w, "a", "b")
    w.join("a", checkpoints=(100, 200, 300))
    w.join("b", checkpoints=(100, 200))
    w.run(2.0)
    assert w.job.phase is Phase.RUNNING
    assert w.job.running is not None
    assert {e.state for e in w.job.running.entries} == {StateAction.CHECKPOINT}


def test_a_generation_from_an_older_checkpoint_is_logged_with_both_steps() -> None:
    """The member reports the step of the checkpoint that it has loaded."""
    w = training("a")
    w.beat("a", 500)
    kill(w, "a")
    w.bring_up = lambda member, generation: None  # type: ignore[method-assign]
    a = w.join("a", checkpoints=(200,))
    w.run(2.0)
    assert w.job.phase is Phase.COMMITTED
    who = {"member_id": "a", "incarnation": a.incarnation}
    w.send(a, events.ReadinessReported(**who, generation=w.job.last_generation, step=Step(200)))
    w.run(2.1)
    (line,) = [line for line in w.log if "job_rolled_back" in line]
    assert "from step 200" in line
    assert "step 500" in line
    assert w.job.progress.reached == 200
    assert w.job.members["a"].holds_state


def test_a_job_continues_from_a_member_with_an_older_state() -> None:
    """The member proposes a step above 0, so that it has a state."""
    w = training("a")
    w.beat("a", 500)
    kill(w, "a")
    w.join("x", step=100)
    w.run(w.now_s + w.job.limits.last_call_s + 1.0)
    assert w.job.running is not None
    assert w.job.running.step == 100
    assert {e.state for e in w.job.running.entries} == {StateAction.KEEP}


def test_a_member_that_alone_lacks_the_checkpoint_is_refused() -> None:
    """A member without the others' checkpoint is refused, as its host may not have mounted the
    directory; the other members train."""
    w = training("a", "b", "c")
    kill(w, "a", "b", "c")
    w.join("a", checkpoints=(100,))
    w.join("b", checkpoints=(100,))
    blind = w.join("c")
    w.run(3.0)
    assert w.roster() == ["a", "b"]
    assert blind.refused is not None
    assert blind.refused.kind == RefusalKind.STATE_LOST
    assert "step 100" in blind.refused.what


def test_a_draining_member_that_alone_has_the_state_hands_it_over() -> None:
    """The joiner takes over the state before the member leaves."""
    w = training("a", "b")
    w.train(4)
    w.drain("a")
    w.members["a"].paused = True
    w.join("x")
    w.run(1.1)
    kill(w, "b")
    w.run(1.2)
    a = w.members["a"]
    a.paused = False
    w.run(1.21)
    stand = events.StepReported(
        member_id="a",
        incarnation=a.incarnation,
        step=Step(4),
        has_state=True,
        left=Generation(1),
    )
    w.send(a, stand)
    w.run(3.0)
    assert w.is_running()
    assert w.roster() == ["x"]
    assert a.drained
    assert w.job.running is not None
    assert w.job.running.step == 4


def test_a_job_of_stateless_members_is_never_lost() -> None:
    """torchrun's agents, for example, agree on rosters and have no state."""
    w = World(JobSpec(job="j", desired_members=1))

    def join() -> None:
        member = w.join("a")
        event = events.TrainingProposed(
            member_id="a",
            incarnation=member.incarnation,
            proposal=replace(member.proposal, stateless=True),
        )
        w.send(member, event)

    join()
    w.run(1.0)
    kill(w, "a")
    join()
    w.run(2.0)
    assert w.is_running()
    assert w.job.last_generation == 2


def test_a_job_is_lost_if_its_members_have_no_whole_state_together() -> None:
    """A member reports this from the bring-up; another attempt would find the same."""
    w = training("a", "b", "c")
    w.train(9)
    w.bring_up = lambda member, generation: None  # type: ignore[method-assign]
    kill(w, "c")
    w.run(2.0)
    assert w.job.phase is Phase.COMMITTED
    a, b = w.members["a"], w.members["b"]
    broke = events.BreakReported(
        member_id="a",
        incarnation=a.incarnation,
        generation=w.job.last_generation,
        error="StateLost: at step 9 nobody has model.0.weight [32:64]",
        own=True,
        state_lost=True,
    )
    w.send(a, broke)
    w.run(2.1)
    assert w.job.phase is Phase.LOST
    assert b.refused is not None
    assert "model.0.weight" in b.refused.seen


# --- changes of leaders ---

SPEC = JobSpec(job="j", max_members=8)
NAMES = {name: new_incarnation(position) for position, name in enumerate("abx", start=1)}


def who(name: str) -> dict[str, str]:
    return {"member_id": name, "incarnation": NAMES[name]}


def member(name: str) -> MemberState:
    return MemberState(**who(name), info=MemberInfo(), joined_s=0.0)


def successor(progress: JobProgress, members: str = "", lost: str | None = None) -> Job:
    saved = SavedJob(
        last_generation=Generation(3),
        record=None,
        before=None,
        members=tuple(member(name) for name in members),
        finished=lost is not None,
        reason="",
        progress=progress,
        lost=lost,
    )
    return restored(SPEC, saved, limits=Limits(), digest_of=digest_of, now_s=0.0)


def attend(job: Job, name: str, now_s: float, *, has_state: bool = False) -> None:
    job.handle(events.MemberJoined(**who(name), spec=SPEC, info=MemberInfo()), now_s)
    proposal = Proposal(fields={"schema": "s1"}, step=Step(0), has_state=has_state)
    job.handle(events.TrainingProposed(**who(name), proposal=proposal), now_s)


def accept(job: Job, name: str, now_s: float) -> list[events.Effect]:
    attempt = job.attempt
    assert attempt is not None
    answer = events.RosterAnswered(
        **who(name), generation=attempt.generation, digest=digest_of(attempt)
    )
    return job.handle(answer, now_s)


def test_a_new_leader_knows_that_the_job_has_trained() -> None:
    """The members ended while no coordinator led: a joiner's refusal has the durable step."""
    job = successor(JobProgress(trained_in=Generation(3), reached=Step(40)))
    attend(job, "x", 0.1)
    effects = accept(job, "x", 0.2)
    assert job.phase is Phase.LOST
    assert job.loss_refusal is not None
    assert "step 40" in job.loss_refusal.what
    kinds = [type(e.notice) if isinstance(e, events.SendNotice) else type(e) for e in effects]
    assert kinds.index(events.FinishJob) < kinds.index(events.RefusedNotice)


def test_a_new_leader_knows_that_the_state_is_lost() -> None:
    """The refusal is that of the earlier leader."""
    job = successor(
        JobProgress(trained_in=Generation(3), reached=Step(40)), lost="a, b hold nothing"
    )
    assert job.phase is Phase.LOST
    try:
        attend(job, "x", 0.1)
    except events.EventRefused as refused:
        assert refused.refusal.kind == RefusalKind.STATE_LOST
        assert "step 40" in refused.refusal.what
        assert refused.refusal.seen == "a, b hold nothing"
    else:
        raise AssertionError("the joiner was accepted")


def test_a_new_leader_waits_for_a_member_that_may_hold_the_state() -> None:
    """The member was known to the old leader, and has not reported its state to the new one."""
    job = successor(JobProgress(trained_in=Generation(3), reached=Step(40)), members="a")
    attend(job, "x", 0.1)
    job.tick(1.0)
    assert job.attempt is None
    attend(job, "a", 1.1, has_state=True)
    job.handle(events.StepReported(**who("a"), step=Step(40), has_state=True), 1.2)
    assert job.attempt is not None
    assert job.attempt.source_member_id == "a"


def test_a_new_leader_waits_for_the_state_only_for_the_grace_period() -> None:
    """The member does not return, and the job is lost."""
    job = successor(JobProgress(trained_in=Generation(3), reached=Step(40)), members="a")
    attend(job, "x", 0.1)
    while (deadline_s := job.next_deadline_s()) is not None and job.attempt is None:
        assert deadline_s < 120.0
        job.tick(deadline_s)
    accept(job, "x", 60.0)
    assert job.phase is Phase.LOST
