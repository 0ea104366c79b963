"""Timeouts of connections between servers."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.core.replication.protocol.limits import DEAD_AFTER_S, ReplicationLimits
from shoal_server.serving.options import INTERNAL


@dataclass(frozen=True, kw_only=True)
class PeerTimeouts:
    """Timeouts between servers."""

    beat_s: Annotated[float, INTERNAL] = 0.3
    """Time without another message after which a server sends a heartbeat. Also the time between
    two probes of a primary that has no link to this server."""
    silence_s: Annotated[float, Parameter(metavar="SECONDS")] = 2.0
    """Time without data from a peer after which a server continues without it. A killed peer is
    noticed at once."""
    reconnect_s: Annotated[float, INTERNAL] = 0.5
    """Time to open a broken stream again before the peer counts as gone."""
    full_s: Annotated[float, INTERNAL] = 4.0
    """Pause before a peer that had no memory for a copy is asked again. Doubled with each refusal,
    up to eight times this value."""

    @property
    def limits(self) -> ReplicationLimits:
        return ReplicationLimits(
            reconnect_s=self.reconnect_s,
            probe_s=self.beat_s,
            full_s=self.full_s,
            max_full_s=8 * self.full_s,
            dead_after_s=DEAD_AFTER_S,
        )

    def __post_init__(self) -> None:
        if not 0 < 3 * self.beat_s <= self.silence_s:
            raise InvalidSpec(
                "bad --silence-s: a server would count as dead between two of its heartbeats",
                seen=f"silence after {self.silence_s:g} s, a heartbeat every {self.beat_s:g} s",
                expected=f"at least {3 * self.beat_s:g} s of silence",
            )
