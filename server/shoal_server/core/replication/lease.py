"""Until when a server may acknowledge: as long as nobody can take it for dead."""

import math

from shoal_server.core.replication.protocol.limits import ReplicationLimits


class Lease:
    """Counted from the sending of the last renewal that succeeded: etcd heard of it later."""

    def __init__(self, limits: ReplicationLimits) -> None:
        self._fenced_after_s = limits.fenced_after_s
        self.ends_s = -math.inf

    def renewed(self, sent_s: float) -> None:
        self.ends_s = max(self.ends_s, sent_s + self._fenced_after_s)

    def holds(self, now_s: float) -> bool:
        return now_s < self.ends_s
