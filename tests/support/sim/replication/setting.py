"""What all that takes part in one run shares."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from support.sim.replication.ledger import Ledger
from support.sim.replication.machine import Network
from support.sim.replication.shard import Disk
from support.sim.replication.store import SimStore
from support.sim.virtual_time import Clock

from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.shards.assignments import Holder

if TYPE_CHECKING:
    from support.sim.replication.server import SimServer

LIMITS = ReplicationLimits(
    dead_after_s=8.0, longest_gap_s=1.8, full_s=1.0, max_full_s=4.0, disk_told_s=2.0
)


@dataclass(eq=False)
class Setting:
    clock: Clock
    network: Network
    store: SimStore
    ledger: Ledger
    limits: ReplicationLimits = LIMITS
    lease_ttl_s: float = 2.0
    """Of a server's registration: it may be longer than others put up with its silence."""
    servers: dict[Holder, "SimServer"] = field(default_factory=dict)
    """Every process that ever was one."""
    disks: dict[str, Disk] = field(default_factory=dict)
    """By server id; one that was lost is there no longer."""
    full: set[str] = field(default_factory=set)
    """Ids of servers without memory for another copy."""
    slow_s: float = 0.0
    """How long a restore, or a settling, may take beyond the usual."""
    copies_fail: float = 0.0
    """How many of the updates that a copy applies make it fail."""
    story: list[tuple[float, str, object]] = field(default_factory=list)
    on_note: Callable[[], None] = lambda: None

    @property
    def chance(self) -> random.Random:
        return self.clock.random

    def note(self, who: str, what: object) -> None:
        self.story.append((self.clock.now_s, who, what))
