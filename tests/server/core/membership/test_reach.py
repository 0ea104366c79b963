"""Members that cannot reach each other, or have unusable addresses, form no generation."""

import pytest
from support.members.job_world import World

from shoal_server.core.generations.ranges import device_problem
from shoal_server.core.generations.roster import JobSpec, MemberInfo
from shoal_server.core.job.prepare import members_to_exclude
from shoal_server.core.membership.events import RefusalKind

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
def test_as_few_members_as_possible_are_excluded(
    cut: list[tuple[str, str]], kept: str, excluded: list[str]
) -> None:
    """The member cut off from most others is excluded first, then the newest; `kept` ones stay."""
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


def test_a_member_that_cannot_reach_itself_trains() -> None:
    """Its report about itself has no effect."""
    w = world("a", "b")
    w.cut = {("a", "a")}
    w.run(1.0)
    assert sorted(w.roster()) == ["a", "b"]


def test_a_member_behind_a_firewall_is_refused_and_the_others_train() -> None:
    """The refusal and the generation record state that b could not be reached."""
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


def test_the_reason_stays_short_however_many_members_are_unreachable() -> None:
    """All members get the reason, and etcd stores it: it names the first of the excluded members,
    and their number."""
    names = [f"w{number:02}" for number in range(40)]
    w = World(JobSpec(job="j", min_members=1, max_members=40, desired_members=40))
    for name in names:
        w.join(name)
    w.cut = {(one, other) for one in names[:20] for other in names[20:]}
    w.run(2.0)
    assert w.roster() == names[:20]
    reason = w.written[1][0].reason
    assert reason.startswith("unreachable: w20, w21, ")
    assert "w29 and 10 more: w00 could not reach w" in reason
    assert len(reason) <= 600


def test_a_joiner_that_cannot_be_reached_stops_no_member() -> None:
    """Members check this before they stop: the old generation runs on."""
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


def test_one_direction_is_not_enough() -> None:
    """A pair counts as cut if one of the two reports it."""
    w = world("a", "b", "c")
    w.cut = {("c", "a")}
    w.run(1.0)
    assert sorted(w.roster()) == ["a", "b"]


def test_a_loopback_address_is_refused_with_members_on_other_hosts() -> None:
    """A member with a loopback address is refused and the others train: no process on another host
    can reach it."""
    w = World(JobSpec(job="j", desired_members=3))
    confined = w.join("a", info=MemberInfo(host="h1", address="127.0.0.1"))
    w.join("b", info=MemberInfo(host="h2", address="10.0.0.2"))
    w.join("c", info=MemberInfo(host="h3", address="10.0.0.3"))
    w.run(1.0)
    assert sorted(w.roster()) == ["b", "c"]
    assert confined.refused is not None
    assert "127.0.0.1" in confined.refused.seen
    assert confined.refused.conflicts[0].field == "address"


def test_a_member_that_trains_on_loopback_stays() -> None:
    """A joiner on another host is refused; one on the same host enters."""
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
def test_a_number_of_devices_out_of_range_is_refused(info: MemberInfo, text: str) -> None:
    """A member on cuda needs at least one device; 5,000 are too many."""
    problem = device_problem(info)
    assert (problem == "") if not text else text in problem
