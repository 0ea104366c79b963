"""How long servers wait for each other and for etcd. One number decides about a death."""

from dataclasses import dataclass

DEAD_AFTER_S = 900.0
"""A server that etcd has not listed for so long is taken for dead with all that it held, whoever
decides it: the coordinator that gives its shards away, the server that leads them from its disk.
Nine tenths of it is how long etcd may be away before pushes wait: more than ten minutes."""

LONGEST_GAP_S = 4.0
"""Between two looks at the servers that etcd lists, for an absence to go on. Less than a lease
lasts: else one that was back in between, and acknowledged, may be taken for dead."""

STOPS_BEFORE = 0.9
"""The part of it after which a primary that could not renew its lease acknowledges nothing any
more: clocks may run at rates that differ by as much as is left, and an answer may be on its way."""


@dataclass(frozen=True, kw_only=True)
class ReplicationLimits:
    """Of one server's core; in seconds."""

    reconnect_s: float = 0.5
    """A link that broke is opened again for so long before its other end is taken for gone."""
    probe_s: float = 0.3
    """Pause between two looks at a primary that has no link to here."""
    full_s: float = 4.0
    """A server without memory for a copy is offered none for so long; each time twice as long."""
    max_full_s: float = 32.0
    dead_after_s: float = DEAD_AFTER_S
    longest_gap_s: float = LONGEST_GAP_S
    announced_s: float = 0.3
    """From when workers are told of a successor until pushes are refused in its favour: they
    connect to it meanwhile."""
    disk_told_s: float = 30.0
    """So often it is written down how far a shard is on disk, while it goes on."""
    transfer_attempts: int = 3
    """Links that may break under an image without a chunk of it getting through."""
    window_chunks: int = 4
    """Chunks of an image that are sent ahead of their acknowledgement."""

    @property
    def fenced_after_s(self) -> float:
        """From the sending of the last renewal that succeeded."""
        return STOPS_BEFORE * self.dead_after_s
