"""Time limits of servers that wait for each other and for etcd."""

from dataclasses import dataclass

DEAD_AFTER_S = 900.0
"""Time after which a server that etcd does not list counts as dead, with all that it had. The
coordinator waits this long before it marks shards as lost, and a server before it leads shards from
its disk, unless the absent processes are known to have ended. If etcd is unavailable for
STOPS_BEFORE of this time (13.5 minutes), pushes wait."""

LONGEST_GAP_S = 4.0
"""Maximum time between two reads of etcd's list of servers for which an absence counts as unbroken.
Shorter than a server's lease in etcd: otherwise a server that was back in between, and acknowledged
pushes, might count as dead."""

STOPS_BEFORE = 0.9
"""Fraction of DEAD_AFTER_S after which a primary without a renewed lease stops acknowledging. The
rest allows for clocks of different rates and for answers in transit."""


@dataclass(frozen=True, kw_only=True)
class ReplicationLimits:
    """Limits of one server's core, in seconds."""

    reconnect_s: float = 0.5
    """Time to reopen a broken link before the peer counts as gone."""
    probe_s: float = 0.3
    """Pause between two probes of a primary that has no link to this server."""
    full_s: float = 4.0
    """Pause before a server without memory for a copy is offered one again; doubled each time, up
    to `max_full_s`."""
    max_full_s: float = 32.0
    dead_after_s: float = DEAD_AFTER_S
    longest_gap_s: float = LONGEST_GAP_S
    announced_s: float = 0.3
    """Time from the notice of a successor to workers until pushes are refused in its favour:
    workers connect to it meanwhile."""
    disk_report_s: float = 30.0
    """Interval at which the version that a shard has on disk is written to its record."""
    transfer_attempts: int = 3
    """Number of links that break in a row during an image, without an acknowledged chunk, after
    which the image is given up."""
    window_chunks: int = 4
    """Number of chunks of an image that are sent ahead of their acknowledgement."""

    @property
    def fenced_after_s(self) -> float:
        """Time from the sending of the last successful renewal until a primary is fenced."""
        return STOPS_BEFORE * self.dead_after_s
