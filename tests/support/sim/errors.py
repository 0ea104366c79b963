"""Errors of a simulated call or wait, one for each kind that the real client distinguishes."""

from collections.abc import Callable

from shoal_server.core.membership.events import Refusal


class Unavailable(Exception):
    """Error of a call that no leader answered; the caller retries."""


class RefusedCall(Exception):
    """The coordinator refused, or ended the membership."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


class CollectiveFailed(Exception):
    """A peer is gone, or the collective was cut."""


def fails(simulated: Callable[[], object]) -> bool:
    """True if the simulation finds a violation."""
    try:
        simulated()
    except AssertionError:
        return True
    return False
