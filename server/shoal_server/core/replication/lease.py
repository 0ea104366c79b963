"""Lease under which a server may acknowledge. It ends before other servers may assume the server
dead."""

import math

from shoal_server.core.replication.protocol.limits import ReplicationLimits


class Lease:
    """Counted from the sending of the last successful renewal."""

    def __init__(self, limits: ReplicationLimits) -> None:
        self._fenced_after_s = limits.fenced_after_s
        self.ends_s = -math.inf
        self._is_over = False

    def renewed(self, sent_s: float) -> None:
        if not self._is_over:
            self.ends_s = max(self.ends_s, sent_s + self._fenced_after_s)

    def end(self, now_s: float) -> None:
        """End the lease for good, also for a renewal in progress."""
        self.ends_s, self._is_over = now_s, True

    def holds(self, now_s: float) -> bool:
        return now_s < self.ends_s
