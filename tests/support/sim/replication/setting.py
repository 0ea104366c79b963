"""Setting that all parts of one run share."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from support.sim.replication.ledger import Ledger
from support.sim.replication.machine import Network
from support.sim.replication.shard import Disk
from support.sim.replication.store import SimStore
from support.sim.virtual_time import Clock

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.limits import ReplicationLimits

if TYPE_CHECKING:
    from support.sim.replication.server import SimServer

LIMITS = ReplicationLimits(
    dead_after_s=8.0, longest_gap_s=1.8, full_s=1.0, max_full_s=4.0, disk_report_s=2.0
)


@dataclass(eq=False)
class Setting:
    clock: Clock
    network: Network
    store: SimStore
    ledger: Ledger
    limits: ReplicationLimits = LIMITS
    lease_ttl_s: float = 2.0
    """Lease of a server's registration: it may exceed the silence that others accept."""
    servers: dict[Holder, "SimServer"] = field(default_factory=dict)
    """All server processes so far, ended ones included."""
    disks: dict[str, Disk] = field(default_factory=dict)
    """Disks by server id, without lost ones."""
    full: set[str] = field(default_factory=set)
    """Ids of servers without memory for another copy."""
    slow_s: float = 0.0
    """Longest extra time of a restore or a settling."""
    copies_fail: float = 0.0
    """Fraction of the updates applied by a copy that make it fail."""
    story: list[tuple[float, str, object]] = field(default_factory=list)
    on_note: Callable[[], None] = lambda: None

    @property
    def chance(self) -> random.Random:
        return self.clock.random

    def note(self, who: str, what: object) -> None:
        self.story.append((self.clock.now_s, who, what))
