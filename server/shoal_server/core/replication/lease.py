"""Until when a server may acknowledge: as long as nobody can take it for dead."""

import math

from shoal_server.core.replication.protocol.limits import ReplicationLimits


class Lease:
    """Counted from the sending of the last renewal that succeeded: etcd heard of it later."""

    def __init__(self, limits: ReplicationLimits) -> None:
        self._fenced_after_s = limits.fenced_after_s
        self.ends_s = -math.inf
        self._is_over = False

    def renewed(self, sent_s: float) -> None:
        if not self._is_over:
            self.ends_s = max(self.ends_s, sent_s + self._fenced_after_s)

    def end(self, now_s: float) -> None:
        """For good: a renewal that is on its way changes nothing any more."""
        self.ends_s, self._is_over = now_s, True

    def holds(self, now_s: float) -> bool:
        return now_s < self.ends_s
