"""Calls under way: at most so many, at most so many of a peer; and how calls ended."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal_proto.errors import InternalError, Overloaded, ShoalError
from shoal_server.serving.admission.config import CallLimits


class CallCounts:
    """Lives on the event loop."""

    def __init__(self, limits: CallLimits | None = None) -> None:
        self._limits = limits or CallLimits()
        self._by_peer: Counter[str] = Counter()
        self.num_open = 0
        self.refused: Counter[str] = Counter()
        """Number of refused calls by kind of refusal."""
        self.failed: Counter[str] = Counter()
        """Number of calls by method whose handler raised something other than a refusal."""

    def ended(self, method: str, refusal: ShoalError) -> None:
        """A call was answered with that."""
        if isinstance(refusal, InternalError):
            self.failed[method] += 1
        else:
            self.refused[type(refusal).__name__] += 1

    @contextmanager
    def open(self, peer: str) -> Iterator[None]:
        """A call is under way as long as the block runs. Raises Overloaded."""
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
    """The address of a peer as gRPC tells it (ipv4:127.0.0.1:40312), without its port."""
    return peer.rpartition(":")[0] or peer


def _too_many(what: str, seen: int, most: int, option: str) -> Overloaded:
    return Overloaded(
        f"too many {what}",
        seen=str(seen),
        expected=f"at most {most}",
        fix=f"Wait for some of them to end, or raise {option}.",
    )
