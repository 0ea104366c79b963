"""Jobs that have trained wait for members for as long as the operator allows."""

import math
from dataclasses import replace

import pytest
from support.members.job_world import World

from shoal_client.membership import member_events as ev
from shoal_server.core.generations.roster import JobSpec, MemberInfo
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import RefusalKind
from shoal_server.core.membership.phases import Phase

JOIN_S = Limits().join_s
STEP = 7


def below_minimum(*, low: int = 2, limits: Limits | None = None) -> World:
    """Return a world in which `low` members trained, and all but a were killed."""
    spec = JobSpec(job="j", min_members=low, max_members=8, desired_members=low)
    w = World(spec, limits=limits)
    for name in ("a", "b", "c")[:low]:
        w.join(name)
    w.run(1.0)
    w.train(STEP)
    for name in ("b", "c")[: low - 1]:
        w.kill(name, seen_by_launcher=True)
    w.run(2.0)
    return w


def still_waits(w: World, name: str) -> bool:
    """True if the member's client waits on as well."""
    member = w.members[name]
    decision = member.core.next_generation(member.generation, 2.0, w.now_s)
    return isinstance(decision, ev.WaitUntil)


def test_a_member_that_holds_the_state_waits_without_a_limit() -> None:
    """The member is not refused after 50 join limits; then a replacement joins, and the job
    continues from the same state."""
    w = below_minimum()
    w.run(50 * JOIN_S)
    assert w.members["a"].refused is None
    assert w.job.members["a"].waiting_for == "1 more member, no limit"
    assert still_waits(w, "a")
    w.join("b")
    w.run(50 * JOIN_S + 1.0)
    assert w.roster() == ["a", "b"]
    assert w.job.progress.reached == STEP


def test_a_joiner_waits_without_a_limit_beside_the_state() -> None:
    """The job lacks two members: the first joiner must not give up just before the second."""
    w = below_minimum(low=3)
    w.join("b")
    w.run(10 * JOIN_S)
    assert w.members["b"].refused is None
    assert {m.waiting_for for m in w.job.members.values()} == {"1 more member, no limit"}
    assert still_waits(w, "a") and still_waits(w, "b")
    w.join("c")
    w.run(10 * JOIN_S + 1.0)
    assert w.roster() == ["a", "b", "c"]


@pytest.mark.parametrize("new_leader", [False, True])
def test_an_asynchronous_member_trains_on_without_a_limit(*, new_leader: bool) -> None:
    """A member of an asynchronous job is not refused below the minimum: the parameter servers have
    the state."""
    w = World(JobSpec(job="j", min_members=2, max_members=8, desired_members=2))
    for name in ("a", "b"):
        w.join(name, synchronous=False)
    w.run(1.0)
    assert w.is_running()
    w.kill("b", seen_by_launcher=True)
    w.run(JOIN_S)
    if new_leader:
        w.change_leader()
    w.run(10 * JOIN_S)
    assert w.members["a"].refused is None
    assert w.job.members["a"].waiting_for == "1 more member, no limit"


def test_members_of_a_job_that_never_trained_keep_the_join_limit() -> None:
    """Members that have not trained have no state to lose."""
    w = World(JobSpec(job="j", min_members=2, max_members=8, desired_members=2))
    a = w.join("a")
    w.run(JOIN_S - 1.0)
    assert a.refused is None
    w.run(JOIN_S + 1.0)
    assert a.refused is not None
    assert a.refused.kind is RefusalKind.TIMEOUT
    assert f"no generation formed within {JOIN_S:g} s" in a.refused.what


def test_a_joiner_without_the_state_has_the_join_limit_again() -> None:
    """The member that had the state is lost while the joiner waits."""
    w = below_minimum(low=3)
    w.join("b")
    w.run(5 * JOIN_S)
    w.kill("a", seen_by_launcher=True)
    w.run(5 * JOIN_S + 1.0)
    assert w.job.members["b"].waiting_for == "other members"
    b = w.members["b"]
    w.run(8 * JOIN_S)
    assert b.refused is not None
    assert b.refused.kind is RefusalKind.TIMEOUT


def test_a_joiner_that_rejects_the_roster_is_refused_alone() -> None:
    """The member that has the state waits on."""
    w = below_minimum()
    a, c = w.members["a"], w.join("c")
    w.rejecting.add("c")
    w.run(5.0)
    assert a.refused is None
    assert c.refused is not None
    assert c.refused.kind is RefusalKind.CONFLICT
    w.join("d")
    w.run(6.0)
    assert w.roster() == ["a", "d"]


@pytest.mark.long
def test_any_number_of_attempts_may_fail_in_a_row() -> None:
    """The wait between attempts is still short after 1,100 failures."""
    w = below_minimum()
    for number in range(1100):
        newcomer = w.join(f"c{number}")
        w.rejecting.add(newcomer.name)
        w.run(w.now_s + 12.0)
        assert newcomer.refused is not None
    w.join("d")
    w.run(w.now_s + 12.0)
    assert w.roster() == ["a", "d"]


def test_a_joiner_that_cannot_be_reached_is_refused_alone() -> None:
    w = below_minimum()
    a, c = w.members["a"], w.join("c")
    w.cut.add(("a", "c"))
    w.run(5.0)
    assert a.refused is None
    assert c.refused is not None
    assert c.refused.kind is RefusalKind.UNREACHABLE


def test_a_joiner_on_another_host_than_a_loopback_member_is_refused_alone() -> None:
    w = below_minimum()
    a = w.members["a"]
    w.job.members["a"].info = replace(w.job.members["a"].info, address="127.0.0.1")
    c = w.join("c", info=MemberInfo(host="elsewhere", address="10.0.0.7"))
    w.run(5.0)
    assert a.refused is None
    assert c.refused is not None
    assert c.refused.kind is RefusalKind.CONFLICT


@pytest.mark.parametrize("allowed_s", [30.0, 1000.0])
def test_the_operator_may_limit_the_wait(allowed_s: float) -> None:
    """The limit may be below the join limit or far above it; `waiting_for` shows it."""
    w = below_minimum(limits=Limits(wait_for_members_s=allowed_s))
    a = w.members["a"]
    assert w.job.members["a"].waiting_for == (
        f"1 more member, until it has waited for {allowed_s:g} s"
    )
    w.run(allowed_s)
    assert a.refused is None
    w.run(allowed_s + max(JOIN_S, 5.0))
    assert a.refused is not None
    assert a.refused.what == (
        f"no generation formed within {allowed_s:g} s: 1 of at least 2 members were ready"
    )


@pytest.mark.parametrize("every_s", [60.0, 200.0])
@pytest.mark.parametrize("low", [2, 3], ids=["enough", "too-few"])
def test_the_wait_counts_from_the_loss_though_newcomers_come_and_go(
    low: int, every_s: float
) -> None:
    """Each newcomer changes the reason to wait; an attempt with enough members fails."""
    w = below_minimum(low=low, limits=Limits(wait_for_members_s=600))
    a = w.members["a"]
    for number in range(30):
        w.join(f"x{number}").paused = True
        w.run(w.now_s + 1.0)
        w.kill(f"x{number}", seen_by_launcher=True)
        w.run(every_s * (number + 1))
        if a.refused is not None:
            break
        assert w.now_s <= 600.0 + JOIN_S
    assert a.refused is not None
    assert a.refused.what.startswith("no generation formed within 600 s")
    assert w.now_s > 600.0


def test_each_shortage_has_the_whole_time() -> None:
    """The job trained between the two, or all its members had gone."""
    w = below_minimum(limits=Limits(wait_for_members_s=600))
    w.run(500.0)
    w.join("b")
    w.run(501.0)
    assert w.roster() == ["a", "b"]
    w.kill("b", seen_by_launcher=True)
    w.run(1000.0)
    assert w.members["a"].refused is None
    w.kill("a", seen_by_launcher=True)
    w.run(1100.0)
    again = w.join("a", step=STEP)
    w.run(1600.0)
    assert again.refused is None
    w.run(1700.0 + JOIN_S)
    assert again.refused is not None


def test_a_member_that_waits_may_be_drained() -> None:
    """A drained member leaves at once although a joiner waits too: the two are too few for a
    generation."""
    w = below_minimum(low=3)
    w.join("b")
    w.run(3.0)
    a = w.members["a"]
    w.drain("a")
    w.run(4.0)
    assert a.drained


def test_a_job_that_waits_may_be_stopped() -> None:
    w = below_minimum()
    a = w.members["a"]
    w.stop("an operator")
    w.run(3.0)
    assert a.drained
    assert w.job.phase is Phase.STOPPED or not w.job.members


def test_an_infinite_limit_is_no_limit() -> None:
    """Zero, negative values and NaN are refused."""
    assert Limits(wait_for_members_s=math.inf).wait_for_members_s is None
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="bad --wait-for-members-s"):
            Limits(wait_for_members_s=bad)
