"""Silence of members: the time allowed depends on the intervals between their heartbeats."""

import random

import pytest

from shoal_server.core.driver.liveness import WINDOW, Liveness
from shoal_server.core.limits import Limits

LIMITS = Limits(heartbeat_s=0.5, join_s=120)


def after(*intervals: float) -> tuple[Liveness, float]:
    """Return a member that sent heartbeats at these intervals, and the time of the last one."""
    now_s = 100.0
    liveness = Liveness(LIMITS, (), now_s)
    liveness.joined("a", now_s)
    for interval_s in (0.5, *intervals):
        now_s += interval_s
        liveness.record_heartbeat("a", 0, now_s)
    return liveness, now_s


def uneven(low: float, high: float, num_beats: int = WINDOW) -> list[float]:
    chance = random.Random(7)
    return [chance.uniform(low, high) for _ in range(num_beats)]


@pytest.mark.parametrize(
    ("intervals", "at_least_s", "at_most_s"),
    [
        pytest.param([], 2.0, 2.0, id="nothing known: the lease"),
        pytest.param([4.0, 0.1], 2.0, 2.0, id="too few: the lease"),
        pytest.param([0.5] * 20, 2.0, 2.0, id="even: the lease"),
        pytest.param(uneven(0.45, 0.55), 2.0, 2.0, id="nearly even: the lease"),
        pytest.param([0.5] * 20 + [6.0], 2.0, 2.0, id="one long gap: the lease"),
        pytest.param([0.5] * 20 + [6.0, 0.1, 6.0, 0.1], 2.0, 2.0, id="two long gaps: the lease"),
        pytest.param(uneven(0.1, 1.5), 3.0, 5.0, id="uneven: more"),
        pytest.param([1.5] * 20, 2.0, 2.0, id="slow, yet even: the lease"),
        pytest.param([3.0] * 20, 3.0, 3.0, id="slower than the lease: their interval"),
        pytest.param(uneven(0.1, 15.0), 16.0, 16.0, id="wild: the limit on silence"),
        pytest.param([60.0] * 20, 16.0, 16.0, id="very slow: the limit on silence"),
        pytest.param(uneven(0.1, 15.0) + [0.5] * WINDOW, 2.0, 2.0, id="wild once, even since"),
    ],
)
def test_the_silence_allowed_depends_on_a_members_own_heartbeats(
    intervals: list[float], at_least_s: float, at_most_s: float
) -> None:
    """The time lies between the lease and the limit on silence. It is computed from the median and
    the deviation of the last intervals."""
    assert (LIMITS.lease_s, LIMITS.silence_s) == (2.0, 16.0)
    liveness, _ = after(*intervals)
    assert at_least_s - 1e-3 <= liveness.allowed_s("a") <= at_most_s + 1e-3


def test_a_member_is_lost_once_its_silence_exceeds_the_time_allowed() -> None:
    """The reason has the silence, the time allowed and the earlier interval of heartbeats."""
    liveness, now_s = after(*[0.5] * 20)
    assert liveness.silent_members(now_s + 1.9) == []
    assert liveness.silent_members(now_s + 2.5) == ["a"]
    assert liveness.why_lost("a", now_s + 1.9) == ""
    assert liveness.why_lost("a", now_s + 2.5) == (
        "no heartbeat for 2.5 s; 2 s are allowed (its median interval is 0.5 s, its deviation 0 s)"
    )


def test_an_uneven_member_is_late_before_it_is_lost() -> None:
    """Silence longer than the lease is not enough if heartbeats come unevenly."""
    liveness, now_s = after(*uneven(0.1, 1.5))
    allowed_s = liveness.allowed_s("a")
    assert liveness.silent_members(now_s + 2.5) == ["a"]
    assert liveness.why_lost("a", now_s + 2.5) == ""
    assert f"{allowed_s:.3g} s are allowed" in liveness.why_lost("a", now_s + allowed_s + 0.1)


def test_all_late_members_are_found() -> None:
    """The result has them in the order of their last heartbeats, or of joining without one."""
    liveness = Liveness(LIMITS, "abcd", 0.0)
    liveness.record_heartbeat("b", 0, 1.0)
    liveness.joined("e", 2.0)
    liveness.record_heartbeat("a", 0, 3.0)
    assert liveness.silent_members(3.5) == ["c", "d", "b"]
    liveness.forget("c")
    assert liveness.silent_members(100.0) == ["d", "b", "e", "a"]


def test_a_pause_of_the_coordinator_does_not_count_as_silence() -> None:
    """A member has its whole time again afterwards, and the gap is not counted as an interval."""
    liveness, now_s = after(*[0.5] * 10)
    for _ in range(WINDOW):
        now_s += 30.0
        liveness.resume(now_s)
        liveness.record_heartbeat("a", 0, now_s + 0.1)
    assert liveness.silent_members(now_s + 1.9) == []
    assert liveness.allowed_s("a") == LIMITS.lease_s


def test_the_step_never_falls() -> None:
    """A heartbeat that arrives late, or another join, leaves the highest step."""
    liveness, now_s = after()
    liveness.record_heartbeat("a", 7, now_s)
    liveness.record_heartbeat("a", 5, now_s)
    liveness.joined("a", now_s)
    assert {name: history.step for name, history in liveness.heartbeats.items()} == {"a": 7}
