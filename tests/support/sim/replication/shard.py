"""A server's copy of a shard: its updates in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from support.sim.replication.machine import Lane

from shoal_server.core.replication.protocol.messages import Key

Update = tuple[int, int]
"""The sender, and the number of its push. Initial values have a negative sender."""

NOTHING = 0


@dataclass(frozen=True, slots=True)
class SimRecord:
    """An update as it was applied, with the version that it made."""

    version: int
    update: Update
    num_bytes: int = 1


@cache
def chained(before: int, update: Update) -> int:
    """Extend the hash of a sequence of updates by its next update."""
    return hash((before, update))


@dataclass(eq=False)
class Copy:
    """Copy in memory, including updates that were received and are not applied yet."""

    key: Key
    placement_id: str
    """Run of the job."""
    epoch: int
    lane: Lane
    updates: list[Update] = field(default_factory=list)
    chain: list[int] = field(default_factory=lambda: [NOTHING])
    """Links of the hash chain, by version."""
    sessions: dict[Update, int] = field(default_factory=dict)
    """The version that each update made."""
    num_applied: int = 0
    """Number of updates applied; the others were received, and wait to be replayed."""
    leads: bool = False
    is_open: bool = False
    is_stopped: bool = False
    is_dropped: bool = False
    is_settled: bool = False
    """True if no record is accepted any more."""

    @property
    def version(self) -> int:
        return len(self.updates)

    @property
    def takes_pushes(self) -> bool:
        return self.leads and self.is_open and not self.is_stopped and not self.is_dropped

    def add(self, update: Update) -> int:
        """Add an update, and return its version. Raises AssertionError for a duplicate."""
        assert update not in self.sessions, f"{self.key}: {update} is applied twice"
        self.updates.append(update)
        self.chain.append(chained(self.chain[-1], update))
        self.sessions[update] = len(self.updates)
        return len(self.updates)

    def has(self, version: int, link: int) -> bool:
        """True if the copy begins with the sequence of this length and last link."""
        return version < len(self.chain) and self.chain[version] == link

    def fill(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self.add(update)
        self.num_applied = len(self.updates)


@dataclass(frozen=True, slots=True)
class Image:
    """An image that a primary has cut."""

    key: Key
    updates: tuple[Update, ...]
    num_chunks: int

    def chunk(self, index: int) -> tuple[Update, ...]:
        size = -(-len(self.updates) // self.num_chunks)
        return self.updates[index * size : (index + 1) * size]


@dataclass(eq=False)
class ArrivingImage:
    placement_id: str
    num_chunks: int
    version: int
    chunks: dict[int, tuple[Update, ...]] = field(default_factory=dict)
    num_stored: int = 0
    is_restored: bool = False

    @property
    def updates(self) -> list[Update]:
        return [update for index in range(self.num_chunks) for update in self.chunks[index]]


@dataclass(frozen=True, slots=True)
class OnDiskCopy:
    placement_id: str
    epoch: int
    updates: tuple[Update, ...]
    chain: tuple[int, ...]

    def has(self, version: int, link: int) -> bool:
        return version < len(self.chain) and self.chain[version] == link


@dataclass(eq=False)
class Disk:
    """A server's disk, which outlives its processes."""

    server_id: str
    shards: dict[Key, OnDiskCopy] = field(default_factory=dict)
    saved: dict[Key, OnDiskCopy] = field(default_factory=dict)
    """Contents when the disk was last copied."""
    fails: bool = False
