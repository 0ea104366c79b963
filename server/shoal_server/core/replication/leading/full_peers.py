"""Servers that had no memory for a copy: left alone for a while, then asked again."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.shards.assignments import Holder


@dataclass(slots=True)
class _Full:
    reason: str
    pause_s: float
    until_s: float


class FullPeers:
    def __init__(self, limits: ReplicationLimits) -> None:
        self._limits = limits
        self._full: dict[Holder, _Full] = {}

    @property
    def reasons(self) -> Mapping[Holder, str]:
        """What each of them said last."""
        return {holder: full.reason for holder, full in self._full.items()}

    @property
    def wakes_s(self) -> float:
        """When the next pause is over."""
        return min((f.until_s for f in self._full.values() if f.until_s), default=float("inf"))

    def is_full(self, holder: Holder) -> bool:
        """Whether it is to be left alone for now."""
        full = self._full.get(holder)
        return full is not None and full.until_s > 0.0

    def refused(self, holder: Holder, reason: str, now_s: float) -> bool:
        """It had no room; whether that is news. What was on its way meanwhile makes no pause
        longer."""
        full = self._full.get(holder)
        if full is None:
            first_s = self._limits.full_s
            self._full[holder] = _Full(reason, first_s, now_s + first_s)
            return True
        full.reason = reason
        if not full.until_s:
            full.pause_s = min(2 * full.pause_s, self._limits.max_full_s)
            full.until_s = now_s + full.pause_s
        return False

    def took(self, holder: Holder) -> bool:
        """It has taken a copy; whether it was full. One sent before the refusal says nothing."""
        full = self._full.get(holder)
        if full is None or full.until_s:
            return False
        del self._full[holder]
        return True

    def forget(self, holder: Holder) -> None:
        """It is gone, or nothing is to be offered to it."""
        self._full.pop(holder, None)

    def over(self, now_s: float) -> list[Holder]:
        """Those whose pause is over by now, once."""
        ready = [h for h, full in self._full.items() if 0.0 < full.until_s <= now_s]
        for holder in ready:
            self._full[holder].until_s = 0.0
        return ready
