"""Coordinators that received SIGTERM stay while members drain."""

import pytest

from shoal_server.coordinator.departure import NOTICE_S, Presence, why_stay

DRAIN_S = 25.0


@pytest.mark.parametrize(
    ("num_members", "num_draining", "since_order_s", "stays"),
    [
        (0, 0, 0.0, False),
        (3, 0, 0.0, True),
        (3, 0, NOTICE_S, False),
        (3, 3, NOTICE_S, True),
        (3, 1, DRAIN_S - 0.1, True),
        (3, 1, DRAIN_S, False),
        (0, 0, NOTICE_S, False),
    ],
)
def test_it_stays_while_members_drain_or_may_still_begin_to(
    num_members: int, num_draining: int, since_order_s: float, stays: bool
) -> None:
    """A coordinator that was asked to end waits a short time for requests to drain, and up to the
    drain limit for members that drain."""
    presence = Presence(num_members=num_members, num_draining=num_draining)
    assert bool(why_stay(presence, since_order_s, DRAIN_S)) == stays


def test_it_stays_until_etcd_has_confirmed_that_members_left() -> None:
    """A coordinator that was asked to end waits for etcd's confirmation at most up to the drain
    limit."""
    assert why_stay(Presence(num_writing=1), NOTICE_S, DRAIN_S) != ""
    assert why_stay(Presence(num_writing=1), DRAIN_S, DRAIN_S) == ""


def test_it_ends_at_once_with_a_drain_limit_of_zero() -> None:
    """Members that drain do not keep it."""
    assert why_stay(Presence(num_members=2, num_draining=2), 0.0, 0.0) == ""
