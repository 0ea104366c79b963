"""Invariants of replication under any fault. A violation raises AssertionError.

A sequence of updates is identified by its length and the last link of its hash chain
(`shard.chained`), so that "this copy has all acknowledged updates" is one comparison.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from support.sim.replication.shard import NOTHING, Copy, Disk, Update, chained
from support.sim.virtual_time import Clock

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.events import AckLevel
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent

Row = tuple[int, int]
"""Length and last link of a sequence of updates."""
EMPTY: Row = (0, NOTHING)


@dataclass(eq=False)
class Promise:
    """Contents of one shard that clients may rely on."""

    replicated: Row = EMPTY
    durable: Row = EMPTY
    opened: Row = EMPTY
    """The shard's initial values, once a client may have read them."""
    loaded: Row = EMPTY
    """Values that the primary loaded from a snapshot, before a client could read them."""


class Ledger:
    """Record of all promises. `find` returns a process's copy of a shard, if it runs and has
    one."""

    def __init__(
        self,
        clock: Clock,
        records: Mapping[Key, ShardAssignment],
        disks: Mapping[str, Disk],
        find: Callable[[Holder, Key], Copy | None],
    ) -> None:
        self._clock = clock
        self._records = records
        self._disks = disks
        self._find = find
        self.placement_id = "1"
        """Run of the job, as stored in etcd."""
        self._promises: defaultdict[tuple[str, Key], Promise] = defaultdict(Promise)
        self._led: dict[tuple[str, Key, int], list[int]] = {}
        """Chain of the primary of a shard in an epoch of a placement, so far."""
        self._acknowledged_by: dict[tuple[str, Key, int], Holder] = {}
        self._chunks_taken: dict[tuple[Holder, int], int] = {}
        self.may_be_dead: Callable[[Holder], bool] = lambda holder: True
        """True if the holder is dead, or away for so long that it counts as dead."""
        self.is_fenced: Callable[[Holder], bool] = lambda holder: False
        """True if others may consider the holder dead by now."""
        self.unread: Callable[[Holder, Copy], Mapping[int, Update]] = lambda holder, copy: {}
        """Returns received updates of a copy, by version, that its process has not read yet."""
        self.num_acknowledged = 0

    def _promise(self, key: Key) -> Promise:
        """Return the promise of the shard in the current placement."""
        return self._promises[self.placement_id, key]

    # --- the record ---

    def recorded(self, key: Key, old: ShardAssignment | None, new: ShardAssignment) -> None:
        promise = self._promise(key)
        if old is not None and new.epoch == old.epoch:
            assert new.primary == old.primary, f"{key}: two primaries in epoch {new.epoch}"
        if old is not None and new.epoch != old.epoch:
            assert new.epoch == old.epoch + 1, f"{key}: {old} to {new}"
            if new.primary not in (old.primary, *old.backups):
                self._check_given_away(key, old, new, promise)
        if old is not None and old.content is not new.content is ShardContent.NONE:
            assert promise.opened == EMPTY, f"{key}: {old} is to be created anew, by {new}"
        self.check(key)

    def _check_given_away(
        self, key: Key, old: ShardAssignment, new: ShardAssignment, promise: Promise
    ) -> None:
        """Check an assignment to a server that held no copy: all holders must be gone."""
        for holder in (old.primary, *old.backups):
            has_it = self._find(holder, key) is not None
            assert not has_it or self.may_be_dead(holder), f"{key}: {holder} lives; {old} to {new}"
        promise.replicated = promise.durable
        if new.content is ShardContent.PRESENT:
            assert new.primary.server_id == old.on_disk, f"{key}: {new.primary} has nothing of it"
            disk = self._disks.get(old.on_disk)
            kept = disk.shards.get(key) if disk is not None else None
            # None if the record was written late, by a process whose disk was lost since.
            on_disk = (kept.epoch, len(kept.updates)) if kept is not None else None
            assert on_disk is None or on_disk >= (old.disk_epoch, old.disk_version), (
                f"{key}: {new.primary} leads an older copy of its disk, {on_disk}; {old}"
            )

    def given_up(self, key: Key) -> None:
        """Record that an operator accepted the loss of the shard."""
        self._promises[self.placement_id, key] = Promise()

    def disk_lost(self, server_id: str) -> None:
        """Record that the disk is gone, or replaced by an older copy."""
        for key, record in self._records.items():
            if record.on_disk == server_id:
                self._promise(key).durable = EMPTY

    # --- promises ---

    def opened(self, copy: Copy) -> None:
        promise, row = self._promises[copy.placement_id, copy.key], (1, copy.chain[1])
        assert promise.opened in (EMPTY, row), f"{copy.key} was created anew"
        promise.opened = row
        promise.replicated = max(promise.replicated, promise.loaded)
        self.check(copy.key)

    def loaded(self, copy: Copy) -> None:
        """Record values that were loaded from a snapshot."""
        promise = self._promises[copy.placement_id, copy.key]
        assert promise.opened == EMPTY, f"{copy.key} had values, and is loaded"
        promise.opened, promise.loaded = (1, copy.chain[1]), (copy.version, copy.chain[-1])

    def acknowledged(
        self, who: Holder, copy: Copy, epoch: int, version: int, level: AckLevel
    ) -> None:
        """Record that a version, and so all before it, was acknowledged to a client."""
        self.num_acknowledged += 1
        key, row = copy.key, (version, copy.chain[version])
        assert not self.is_fenced(who), f"{who} acknowledges {key} although it may be dead"
        if level is AckLevel.APPLIED:
            return
        led = copy.placement_id, key, epoch
        before = self._acknowledged_by.setdefault(led, who)
        assert before == who, f"{key}: {who} and {before} acknowledge in epoch {epoch}"
        promise = self._promises[copy.placement_id, key]
        promise.replicated = self._longer(led, promise.replicated, row)
        if level is AckLevel.DURABLE:
            promise.durable = self._longer(led, promise.durable, row)
        self.check(key)

    def _longer(self, led: tuple[str, Key, int], before: Row, row: Row) -> Row:
        chain, key = self._led[led], led[1]
        shorter = min(before, row)
        assert chain[shorter[0]] == shorter[1], f"{key}: {row} does not go on from {before}"
        return max(before, row)

    def check(self, key: Key) -> None:
        """Check that every possible next primary has all promised updates, in order."""
        record, promise = self._records.get(key), self._promise(key)
        if record is None:
            return
        # The holders of a lost shard lead nothing, and drop the copies they were to join with.
        holders = () if record.content is ShardContent.LOST else (record.primary, *record.backups)
        for holder in holders:
            copy = self._find(holder, key)
            if copy is not None:
                assert self._will_have(holder, copy, *promise.replicated), (
                    f"{key}: {holder} has {copy.version} updates, not all of the"
                    f" {promise.replicated[0]} acknowledged ones; {record}"
                )
        if promise.durable != EMPTY:
            disk = self._disks.get(record.on_disk)
            on_disk = disk.shards.get(key) if disk is not None else None
            assert on_disk is not None and on_disk.has(*promise.durable), (
                f"{key}: the disk that {record} names has"
                f" {len(on_disk.updates) if on_disk else 0} updates,"
                f" not all of the {promise.durable[0]} durable ones"
            )

    def _will_have(self, holder: Holder, copy: Copy, version: int, link: int) -> bool:
        """True if the copy has this row, or will have it once the received updates are read."""
        if copy.has(version, link):
            return True
        chain = copy.chain[-1]
        unread = self.unread(holder, copy)
        for number in range(copy.version + 1, version + 1):
            if number not in unread:
                return False
            chain = chained(chain, unread[number])
        return version > copy.version and chain == link

    # --- copies of servers ---

    def leads(self, who: Holder, copy: Copy) -> None:
        key = copy.key
        self._led[copy.placement_id, key, copy.epoch] = copy.chain
        record = self._records[key]
        if copy.placement_id == self.placement_id and (record.primary, record.epoch) == (
            who,
            copy.epoch,
        ):
            replicated = self._promise(key).replicated
            assert copy.has(*replicated), f"{who} leads {key} without {replicated[0]} updates"

    def leads_no_longer(self, copy: Copy) -> None:
        self._led[copy.placement_id, copy.key, copy.epoch] = list(copy.chain)

    def follows(self, who: Holder, copy: Copy) -> None:
        """Check that the copy equals the primary's of its epoch, up to the copy's version."""
        assert not copy.leads, f"{who} leads {copy.key}, and something is installed on it"
        chain = self._led.get((copy.placement_id, copy.key, copy.epoch))
        assert chain is not None, f"nobody led {copy.key} in epoch {copy.epoch}"
        assert copy.version < len(chain) and chain[copy.version] == copy.chain[-1], (
            f"{copy.key} at {who} is another one than its primary's of epoch {copy.epoch},"
            f" at version {copy.version}"
        )
        self.check(copy.key)

    # --- images ---

    def chunk_sent(self, who: Holder, image: int, index: int) -> None:
        taken = self._chunks_taken.get((who, image), 0)
        assert index >= taken, f"{who} sends chunk {index} of image {image} again"

    def chunk_taken(self, who: Holder, image: int, next_chunk: int) -> None:
        taken = self._chunks_taken.get((who, image), 0)
        self._chunks_taken[who, image] = max(taken, next_chunk)
