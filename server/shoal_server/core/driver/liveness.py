"""Detection of silent members, which allows for slow and uneven networks.

A member may be silent for its median interval between heartbeats plus several median deviations: at
least for the lease, at most for the limit on silence. With medians, one long gap does not make the
next look usual.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from shoal_server.core.limits import Limits

WINDOW = 32
"""Intervals kept: the last 16 s at heartbeats of half a second."""
MIN_INTERVALS = 4
"""Number of intervals from which the spread is known."""
DEVIATIONS = 8.0
"""About 5 standard deviations of normally distributed intervals."""


@dataclass(kw_only=True, slots=True)
class HeartbeatHistory:
    """A member's signs of life."""

    at_s: float
    step: int = 0
    _beat_s: float | None = None
    _intervals: "array[float]" = field(default_factory=lambda: array("f"))
    _next: int = 0

    def record_heartbeat(self, step: int, now_s: float) -> None:
        if self._beat_s is not None:
            self._keep(now_s - self._beat_s)
        self.at_s = self._beat_s = now_s
        self.step = max(self.step, step)

    def resume(self, now_s: float) -> None:
        """Restart the silence without an interval."""
        self.at_s, self._beat_s = now_s, None

    def spread_s(self) -> tuple[float, float]:
        """Median interval and median absolute deviation; zeros while too few are known."""
        if len(self._intervals) < MIN_INTERVALS:
            return 0.0, 0.0
        middle = median(self._intervals)
        return middle, median(abs(interval - middle) for interval in self._intervals)

    def _keep(self, interval_s: float) -> None:
        if len(self._intervals) < WINDOW:
            self._intervals.append(interval_s)
        else:
            self._intervals[self._next] = interval_s
            self._next = (self._next + 1) % WINDOW


class Liveness:
    """Signs of life of one job's members. A heartbeat takes constant time."""

    def __init__(self, limits: Limits, members: Iterable[str], now_s: float) -> None:
        self._limits = limits
        # Ordered by the newest sign of life, oldest first.
        self._pulses: dict[str, HeartbeatHistory] = {
            name: HeartbeatHistory(at_s=now_s) for name in members
        }

    def joined(self, member_id: str, now_s: float) -> None:
        """Note that a member opened its stream."""
        pulse = self._pulses.pop(member_id, None) or HeartbeatHistory(at_s=now_s)
        pulse.resume(now_s)
        self._pulses[member_id] = pulse

    def record_heartbeat(self, member_id: str, step: int, now_s: float) -> None:
        pulse = self._pulses.pop(member_id, None) or HeartbeatHistory(at_s=now_s)
        pulse.record_heartbeat(step, now_s)
        self._pulses[member_id] = pulse

    def forget(self, member_id: str) -> None:
        self._pulses.pop(member_id, None)

    def resume(self, now_s: float) -> None:
        """Restart all silences."""
        for pulse in self._pulses.values():
            pulse.resume(now_s)

    @property
    def heartbeats(self) -> Mapping[str, HeartbeatHistory]:
        """Signs of life, by member id."""
        return self._pulses

    def silent_members(self, now_s: float) -> list[str]:
        """Members without a sign of life for a lease."""
        names = []
        for name, pulse in self._pulses.items():
            if now_s - pulse.at_s <= self._limits.lease_s:
                break
            names.append(name)
        return names

    def allowed_s(self, member_id: str) -> float:
        """Return how long the member may be silent. Raises KeyError for an unknown member."""
        middle_s, deviation_s = self._pulses[member_id].spread_s()
        wanted_s = middle_s + DEVIATIONS * deviation_s
        return min(max(wanted_s, self._limits.lease_s), self._limits.silence_s)

    def silent_s(self, member_id: str, now_s: float) -> float:
        """Return the time since the member's newest sign of life. Raises KeyError."""
        return now_s - self._pulses[member_id].at_s

    def why_lost(self, member_id: str, now_s: float) -> str:
        """Return why the member is lost, if it is. Raises KeyError."""
        pulse, allowed_s = self._pulses[member_id], self.allowed_s(member_id)
        silent_s = self.silent_s(member_id, now_s)
        if silent_s <= allowed_s:
            return ""
        reason = f"no heartbeat for {silent_s:.3g} s; {allowed_s:.3g} s are allowed"
        middle_s, deviation_s = pulse.spread_s()
        if middle_s:
            reason += (
                f" (its median interval is {middle_s:.2g} s, its deviation {deviation_s:.2g} s)"
            )
        return reason
