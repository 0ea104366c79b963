"""Servers that lacked memory for a copy, and get no offer during a pause."""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.limits import ReplicationLimits


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
        """Latest refusal of each full server."""
        return {holder: full.reason for holder, full in self._full.items()}

    @property
    def wakes_s(self) -> float:
        """End of the next pause; infinite if there is none."""
        return min((f.until_s for f in self._full.values() if f.until_s), default=float("inf"))

    def is_full(self, holder: Holder) -> bool:
        full = self._full.get(holder)
        return full is not None and full.until_s > 0.0

    def note_refusal(self, holder: Holder, reason: str, now_s: float) -> bool:
        """Note a refusal for lack of memory; True for the first. Refusals during a pause do not
        lengthen it."""
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

    def note_copied(self, holder: Holder) -> bool:
        """Note that the server took a copy; True if it was full. A copy taken during a pause does
        not count: it was sent before the refusal."""
        full = self._full.get(holder)
        if full is None or full.until_s:
            return False
        del self._full[holder]
        return True

    def forget(self, holder: Holder) -> None:
        self._full.pop(holder, None)

    def expired(self, now_s: float) -> list[Holder]:
        """Servers whose pause has ended, each once."""
        ready = [h for h, full in self._full.items() if 0.0 < full.until_s <= now_s]
        for holder in ready:
            self._full[holder].until_s = 0.0
        return ready
