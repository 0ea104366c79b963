"""Time limits of servers that wait for each other and for etcd."""

from dataclasses import dataclass

DEAD_AFTER_S = 900.0
"""Time after which a server that etcd does not list counts as dead. The coordinator then marks
shards as lost, and servers lead shards from disk, unless absent processes are known to have ended
earlier. Pushes wait once etcd has been unavailable for STOPS_BEFORE of this time (13.5 minutes)."""

LONGEST_GAP_S = 4.0
"""Longest time between two lists of servers over which an absence counts as unbroken. It is shorter
than a server's lease in etcd, so that no return between the lists is missed."""

STOPS_BEFORE = 0.9
"""Fraction of DEAD_AFTER_S after which a primary without a renewed lease stops acknowledging. The
rest allows for differing clocks and answers in transit."""


@dataclass(frozen=True, kw_only=True)
class ReplicationLimits:
    reconnect_s: float = 0.5
    """Time to reopen a broken link before the peer is given up."""
    probe_s: float = 0.3
    """Pause between two probes of a primary that has no link to this server."""
    full_s: float = 4.0
    """Pause before a full server is offered a copy again, doubled each time up to `max_full_s`."""
    max_full_s: float = 32.0
    dead_after_s: float = DEAD_AFTER_S
    longest_gap_s: float = LONGEST_GAP_S
    announced_s: float = 0.3
    """Time from the notice of a successor until pushes are refused: workers connect to it
    meanwhile."""
    disk_report_s: float = 30.0
    """Interval at which the version on disk is written to records."""
    transfer_attempts: int = 3
    """Breaks in a row without an acknowledged chunk after which an image is given up."""
    window_chunks: int = 4
    """Chunks sent ahead of their acknowledgement."""

    @property
    def fenced_after_s(self) -> float:
        """Time from the sending of the last successful renewal until the primary is fenced."""
        return STOPS_BEFORE * self.dead_after_s
