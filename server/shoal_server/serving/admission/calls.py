"""Calls in progress, limited in total and for each peer, and counts of failed calls."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal_proto.errors import InternalError, Overloaded, ShoalError
from shoal_server.serving.admission.config import CallLimits


class CallCounts:
    """Calls in progress and failed calls of one server. Use it on one event loop."""

    def __init__(self, limits: CallLimits | None = None) -> None:
        self._limits = limits or CallLimits()
        self._by_peer: Counter[str] = Counter()
        self.num_open = 0
        self.refused: Counter[str] = Counter()
        """Numbers of calls answered with an error other than InternalError, by the error's
        class."""
        self.failed: Counter[str] = Counter()
        """Numbers of calls answered with InternalError, by method."""

    def ended(self, method: str, refusal: ShoalError) -> None:
        """Count a call that was answered with `refusal`."""
        if isinstance(refusal, InternalError):
            self.failed[method] += 1
        else:
            self.refused[type(refusal).__name__] += 1

    @contextmanager
    def open(self, peer: str) -> Iterator[None]:
        """Count a call as in progress during the block. Raises Overloaded beyond the limits."""
        host = host_of(peer)
        limits = self._limits
        if self.num_open >= limits.max_calls:
            raise _too_many("calls are in progress", self.num_open, limits.max_calls, "--max-calls")
        if self._by_peer[host] >= limits.max_calls_per_peer:
            what = f"calls of {host} are in progress"
            most = limits.max_calls_per_peer
            raise _too_many(what, self._by_peer[host], most, "--max-calls-per-peer")
        self.num_open += 1
        self._by_peer[host] += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self._by_peer[host] -= 1
            if not self._by_peer[host]:
                del self._by_peer[host]


def host_of(peer: str) -> str:
    """Name of a peer (ipv4:127.0.0.1:40312) without the port."""
    return peer.rpartition(":")[0] or peer


def _too_many(what: str, seen: int, most: int, option: str) -> Overloaded:
    return Overloaded(
        f"too many {what}",
        seen=str(seen),
        expected=f"at most {most}",
        fix=f"Wait for some of them to end, or raise {option}.",
    )
