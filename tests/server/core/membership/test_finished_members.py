"""Members that finish their work before others, as torchrun's nodes may."""

from functools import partial

import pytest
from support.members.job_world import World, training

from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.membership.events import RefusalKind
from shoal_server.core.membership.phases import Phase

world = partial(training, stateless=True)


def test_the_loss_of_a_finished_member_breaks_nothing() -> None:
    """A finished member may exit, halt, be drained or leave: the generation runs on."""
    w = world("a", "b", "c", "d", "e")
    for name in "abcd":
        w.finish(name)
    w.run(2.0)
    w.kill("a", seen_by_launcher=True)
    w.halt("b")
    w.drain("c")
    w.complete("d")
    w.run(100.0)
    assert (w.job.phase, w.job.last_generation, list(w.job.members)) == (Phase.RUNNING, 1, ["e"])
    w.complete("e")
    w.run(101.0)
    assert w.job.phase is Phase.FINISHED


@pytest.mark.parametrize("least", [1, 2, 3])
def test_other_members_form_a_generation_without_a_finished_one(least: int) -> None:
    """A finished member need neither stop nor propose, and counts towards the minimum."""
    w = world("a", "b", "c", low=least)
    w.finish("a")
    w.run(2.0)
    w.fail("b")
    w.fail("c")
    w.run(3.0)
    assert (sorted(w.roster()), w.job.last_generation) == (["b", "c"], 2)
    w.kill("c", seen_by_launcher=True)
    w.run(4.0)
    if least == 3:
        assert w.job.phase is Phase.COLLECT
        return
    assert w.roster() == ["b"]
    w.complete("a")
    w.complete("b")
    w.run(5.0)
    assert w.job.phase is Phase.FINISHED


def test_a_joiner_waits_until_a_generation_with_a_finished_member_ends() -> None:
    w = world("a", "b", "c")
    w.finish("a")
    w.run(2.0)
    late = w.join("d", stateless=True)
    w.run(500.0)
    assert (w.roster(), w.job.last_generation) == (["a", "b", "c"], 1)
    assert late.core.is_standby
    assert late.refused is None
    w.kill("b", seen_by_launcher=True)
    w.run(501.0)
    assert w.roster() == ["c", "d"]
    w.finish("c")
    w.finish("d")
    w.run(502.0)
    assert all(member.core.track.is_closing for member in w.members.values())


def test_a_drained_member_is_replaced_without_the_finished_ones() -> None:
    """The newcomer needs no state from them."""
    w = world("a", "b")
    w.finish("a")
    w.run(2.0)
    w.join("c", stateless=True)
    w.run(3.0)
    w.drain("b")
    w.run(4.0)
    assert w.roster() == ["c"]


def test_a_joiner_is_refused_once_all_members_have_finished() -> None:
    w = world("a", "b")
    w.finish("a")
    w.run(2.0)
    late = w.join("c", stateless=True)
    w.run(3.0)
    w.finish("b")
    w.run(4.0)
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.FINISHED
    for name in "ab":
        assert w.members[name].core.track.is_closing
        w.complete(name)
    w.run(5.0)
    assert w.job.phase is Phase.FINISHED


def test_a_job_whose_last_member_failed_is_not_completed() -> None:
    """The job collects members again, at least the minimum."""
    w = world("a", "b", low=2)
    w.finish("a")
    w.run(2.0)
    w.kill("b", seen_by_launcher=True)
    w.run(3.0)
    w.complete("a")
    w.run(4.0)
    assert (w.job.phase, dict(w.job.members)) == (Phase.COLLECT, {})
    w.join("b", stateless=True)
    w.run(20.0)
    assert w.job.phase is Phase.COLLECT
    w.join("a", stateless=True)
    w.run(40.0)
    assert len(w.roster()) == 2


def test_a_stopped_job_is_not_completed_by_a_finished_member() -> None:
    w = world("a", "b")
    w.finish("a")
    w.run(2.0)
    w.stop("enough")
    w.run(10.0)
    assert (w.job.phase, w.job.reason) == (Phase.STOPPED, "enough")


def test_the_last_member_that_finishes_completes_the_job() -> None:
    """A lost member need not have finished."""
    w = world("a", "b")
    w.kill("b", seen_by_launcher=True)
    w.finish("a")
    w.run(2.0)
    assert w.members["a"].core.track.is_closing
    w.complete("a")
    w.run(3.0)
    assert w.job.phase is Phase.FINISHED


def test_a_drain_is_carried_out_beside_a_finished_member() -> None:
    w = world("a", "b", "c")
    w.finish("a")
    w.run(2.0)
    w.drain("b")
    w.run(3.0)
    assert w.roster() == ["c"]
    assert sorted(w.members) == ["a", "c"]


def test_a_member_that_finishes_cancels_a_planned_change() -> None:
    """The joiner's generation is in PREPARE when the member finishes."""
    w = World(JobSpec(job="j", max_members=8, desired_members=2), max_delay_s=0.2, seed=3)
    for name in "ab":
        w.join(name, stateless=True)
    w.run(5.0)
    w.join("c", stateless=True)
    for tenth in range(50, 80):
        w.run(tenth / 10)
        if w.job.phase is Phase.PREPARE:
            break
    assert w.job.phase is Phase.PREPARE
    w.finish("a")
    w.run(30.0)
    assert w.job.phase is Phase.RUNNING
    left = w.roster()
    assert left in (["a", "b"], ["b", "c"]), "the roster before, or one without the finished member"


@pytest.mark.parametrize("seed", range(40))
def test_in_any_order_of_events_finished_members_end_the_job(seed: int) -> None:
    """Members join, drain, fail and finish at random times. Once all have finished, all may close;
    the job is then finished, or collects members if none has completed it."""
    w = World(JobSpec(job="j", max_members=8, desired_members=3), max_delay_s=0.3, seed=seed)
    for name in "abc":
        w.join(name, stateless=True)
    w.run(5.0)
    at_s = 5.0
    for name in w.random.sample("abc", 3):
        at_s += w.random.uniform(0.0, 1.0)
        w.run(at_s)
        match w.random.randrange(4):
            case 0:
                w.fail(name)
            case 1:
                w.join(f"late-{name}", stateless=True)
            case 2:
                w.drain(name)
        w.finish(name)
    w.run(at_s + 60.0)
    for name in list(w.members):
        w.finish(name)
    w.run(at_s + 70.0)
    assert all(member.core.track.is_closing for member in w.members.values())
    for name in list(w.members):
        w.complete(name)
    w.run(at_s + 80.0)
    assert w.job.phase in (Phase.FINISHED, Phase.COLLECT), w.job.reason


def test_a_closed_job_refuses_joiners_and_runs_on() -> None:
    """The members form no further generation: when theirs breaks, they leave, and the job is
    finished."""
    w = world("a", "b")
    w.finish("a", closes=True)
    w.run(2.0)
    assert all(member.core.track.is_closing for member in w.members.values())
    late = w.join("c", stateless=True)
    w.run(3.0)
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.FINISHED
    assert w.roster() == ["a", "b"]
    w.fail("b")
    w.run(100.0)
    assert not w.members
    assert w.job.phase is Phase.FINISHED


def test_a_new_leader_does_not_wait_for_finished_members() -> None:
    """The job's record names them. One has left, and one does not return."""
    w = world("a", "b", "c")
    for name in "ab":
        w.finish(name)
    w.run(2.0)
    w.complete("a")
    w.run(3.0)
    w.members.pop("b")
    w.change_leader()
    w.run(100.0)
    assert (w.roster(), list(w.job.members)) == (["a", "b", "c"], ["c"])
    w.complete("c")
    w.run(101.0)
    assert w.job.phase is Phase.FINISHED


@pytest.mark.parametrize("stopping", [False, True])
def test_a_job_whose_members_end_without_a_leader_is_finished(*, stopping: bool) -> None:
    """All have reported the end of their work, and none its leave; the job may also be stopped. The
    leader died before it wrote that the job completes."""
    w = world("a", "b")
    for name in "ab":
        w.finish(name)
    w.run(2.0)
    if stopping:
        w.stop("enough")
    w.members.clear()
    w.job.end.completing = False
    w.change_leader()
    w.run(100.0)
    assert w.job.phase is Phase.FINISHED
    assert w.job.reason == "all members have done their work"
