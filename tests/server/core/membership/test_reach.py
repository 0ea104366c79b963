"""Members that cannot reach each other, or whose addresses cannot work, never start together."""

import pytest
from support.members.job_world import World

from shoal_server.core.generations.ranges import device_problem
from shoal_server.core.generations.roster import JobSpec, MemberInfo
from shoal_server.core.membership.events import RefusalKind
from shoal_server.core.membership.reach import members_to_exclude

ORDER = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("cut", "kept", "excluded"),
    [
        ([("a", "d"), ("b", "d"), ("c", "d")], "", ["d"]),
        ([("d", "a"), ("d", "b"), ("d", "c")], "", ["d"]),
        ([("a", "b"), ("a", "c"), ("a", "d")], "", ["a"]),
        ([("a", "b")], "", ["b"]),
        ([("a", "b")], "b", ["a"]),
        ([("a", "c"), ("a", "d")], "a", ["c", "d"]),
        ([("a", "b")], "ab", []),
        ([("a", "b"), ("c", "d")], "", ["b", "d"]),
        ([], "", []),
    ],
)
def test_the_fewest_go(cut: list[tuple[str, str]], kept: str, excluded: list[str]) -> None:
    """The member cut off from most others goes first, then the newest; members that train stay."""
    unreachable: dict[str, dict[str, str]] = {}
    for one, other in cut:
        unreachable.setdefault(one, {})[other] = "refused"
    found = members_to_exclude(unreachable, newest_last=ORDER, kept=set(kept))
    assert sorted(found) == excluded
    assert all("could not reach" in seen for seen in found.values())


def world(*names: str) -> World:
    w = World(JobSpec(job="j", min_members=1, max_members=8, desired_members=len(names)))
    for name in names:
        w.join(name)
    return w


def test_a_member_behind_a_firewall_is_named_and_the_rest_go_on() -> None:
    """Member b cannot be reached: it is refused by name, and three train without delay."""
    w = world("a", "b", "c", "d")
    w.cut = {(other, "b") for other in ("a", "c", "d")}
    shut = w.members["b"]
    w.run(1.0)
    assert w.is_running()
    assert sorted(w.roster()) == ["a", "c", "d"]
    assert shut.refused is not None
    assert shut.refused.kind == RefusalKind.UNREACHABLE
    assert "could not reach b" in shut.refused.seen
    assert "unreachable" in w.written[1][0].reason


def test_a_joiner_that_cannot_be_reached_disturbs_nobody() -> None:
    """Reachability is checked before anything is stopped: the old generation runs on."""
    w = world("a", "b")
    w.run(1.0)
    w.cut = {("x", "a"), ("a", "x"), ("b", "x")}
    joiner = w.join("x")
    w.run(2.0)
    assert joiner.refused is not None
    assert joiner.refused.kind == RefusalKind.UNREACHABLE
    assert w.roster() == ["a", "b"]
    assert w.job.running is not None
    assert w.job.running.generation == 1
    assert not w.members["a"].broken


def test_one_way_is_not_enough() -> None:
    """A pair counts as cut if either side reports it."""
    w = world("a", "b", "c")
    w.cut = {("c", "a")}
    w.run(1.0)
    assert sorted(w.roster()) == ["a", "b"]


def test_loopback_addresses_do_not_meet_other_hosts() -> None:
    """Members on several hosts are refused if only their own host reaches their address."""
    w = World(JobSpec(job="j", desired_members=3))
    confined = w.join("a", info=MemberInfo(host="h1", address="127.0.0.1"))
    w.join("b", info=MemberInfo(host="h2", address="10.0.0.2"))
    w.join("c", info=MemberInfo(host="h3", address="10.0.0.3"))
    w.run(1.0)
    assert sorted(w.roster()) == ["b", "c"]
    assert confined.refused is not None
    assert "127.0.0.1" in confined.refused.seen
    assert confined.refused.conflicts[0].field == "address"


def test_who_trains_on_loopback_is_not_disturbed_by_another_host() -> None:
    """A newcomer from another host is refused; one from the same host is taken in."""
    w = World(JobSpec(job="j", desired_members=1, max_members=4))
    w.join("a", info=MemberInfo(host="h1", address="127.0.0.1"))
    w.run(1.0)
    other = w.join("b", info=MemberInfo(host="h2", address="10.0.0.2"))
    w.join("c", info=MemberInfo(host="h1", address="127.0.0.1"))
    w.run(3.0)
    assert w.roster() == ["a", "c"]
    assert other.refused is not None
    assert not w.members["a"].broken


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (MemberInfo(device="cpu"), ""),
        (MemberInfo(device="cuda", num_devices=8), ""),
        (MemberInfo(device="cuda", num_devices=0), "0 devices"),
        (MemberInfo(device="cpu", num_devices=5000), "5000 devices"),
    ],
)
def test_devices_are_in_range(info: MemberInfo, text: str) -> None:
    """A member on cuda has at least one device; none has thousands."""
    problem = device_problem(info)
    assert (problem == "") if not text else text in problem
