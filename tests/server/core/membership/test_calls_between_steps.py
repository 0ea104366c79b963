"""Members in a shared call repeat it after a loss without newcomers, even below the minimum.

A joiner's script is at another position, so it enters after the call.
"""

from support.members.job_world import World

from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import RefusalKind

STEP = 7
WAITS = "the end of a call between two steps"


def in_call(*crew: str, low: int, enough: int = 1, lost: str = "bc") -> World:
    """Return a world in which a, b and c have trained and the members `crew` are in a shared call
    when the members `lost` are killed."""
    w = World(JobSpec(job="j", min_members=low, max_members=8, desired_members=3))
    for name in "abc":
        w.join(name)
    w.run(1.0)
    w.train(STEP)
    for name in crew:
        w.members[name].enough_for_call = enough
    for name in lost:
        w.kill(name, seen_by_launcher=True)
    return w


def rosters(w: World) -> list[tuple[str, ...]]:
    return [records[-1].roster.member_ids for records in w.written.values()]


def join_all(w: World, *names: str) -> None:
    for name in names:
        w.join(name)


def test_the_last_member_in_a_call_ends_it_alone_and_joiners_enter_after_it() -> None:
    w = in_call("a", low=2)
    join_all(w, "b", "c")
    waited = []
    w.check = lambda: waited.append(w.job.members["b"].waiting_for if len(w.written) == 2 else "")
    w.run(3.0)
    assert rosters(w)[1] == ("a",)
    assert any(WAITS in reason for reason in waited)
    assert w.roster() == ["a", "b", "c"]
    assert not any("bring_up_failed" in line for line in w.log)


def test_the_last_member_in_a_call_ends_it_without_joiners() -> None:
    w = in_call("a", low=2)
    w.run(3.0)
    assert w.roster() == ["a"]


def test_after_the_call_the_minimum_holds_again() -> None:
    w = in_call("a", low=2)
    w.run(2.0)
    w.members["a"].enough_for_call = 0
    w.report_broken(w.members["a"])
    w.run(60.0)
    assert w.job.running is None
    join_all(w, "b")
    w.run(62.0)
    assert w.roster() == ["a", "b"]


def test_a_member_that_has_left_the_call_waits_for_those_in_it() -> None:
    """A member that has the result of the call does not repeat the call: the next generation has
    only the member that is still in it, and the one after that has both."""
    w = in_call("a", low=2, lost="c")
    w.run(3.0)
    assert rosters(w)[1] == ("a",)
    assert w.roster() == ["a", "b"]


def test_all_members_in_the_call_repeat_it_together() -> None:
    w = in_call("a", "b", low=3, lost="c")
    join_all(w, "d")
    w.run(3.0)
    assert rosters(w)[1] == ("a", "b")
    assert w.roster() == ["a", "b", "d"]


def test_a_member_that_cannot_repeat_the_call_alone_is_refused_after_the_join_limit() -> None:
    w = in_call("a", low=2, enough=2)
    a = w.members["a"]
    join_all(w, "b", "c")
    join_s = Limits().join_s
    w.run(join_s - 1.0)
    assert (a.refused, w.job.running) == (None, None)
    w.run(join_s + 5.0)
    assert a.refused is not None
    assert a.refused.kind == RefusalKind.TIMEOUT
    assert "a were in a call between two steps" in a.refused.what
    assert "at least 2 of the members that began it" in a.refused.what
