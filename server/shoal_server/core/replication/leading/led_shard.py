"""A shard led by this server: its followers, its safe versions, and its wanted record."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import count
from math import inf

from shoal_server.core.processes import Holder
from shoal_server.core.replication.leading.followers import Follower, FollowerPhase
from shoal_server.core.replication.protocol.effects import (
    AcknowledgeVersion,
    AckRefusalReason,
    Effect,
    OpenShard,
    RefuseVersion,
    ResumePushes,
    SetFollowers,
    SetUnreplicated,
    StopPushes,
)
from shoal_server.core.replication.protocol.events import AckLevel, Token
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    ShardContent,
    exchange_primary,
    filled,
    in_step,
    record_disk,
    without_backup,
)
from shoal_server.core.shards.shard_log import Record, ShardLog

LEVEL_WITHIN_S = 5.0
"""Time after `stops_from_s` at which pushes stop even if backups lag: under continuous pushes they
may never be level."""


class HandoverPhase(Enum):
    NONE = "there is no handover"
    LEVELLING = "workers are notified and backups catch up, while pushes are still accepted"
    STOPPING = "the edge is to refuse pushes, and to report the last one that was applied"
    STOPPED = "no push is applied any longer"


@dataclass(slots=True)
class Handover:
    phase: HandoverPhase = HandoverPhase.NONE
    stops_from_s: float = inf
    is_writing: bool = False
    """True while a write may hand the shard over."""

    @property
    def is_announced(self) -> bool:
        return self.phase is HandoverPhase.LEVELLING


@dataclass(slots=True)
class _Disk:
    keeps: bool
    version: int | None = None
    """Version up to which the whole shard is in the journal; None: it is not there."""
    reported: int = 0
    """Version on disk that the record is to state."""


class _Waiters:
    """Callers that wait until a version is safe at one `AckLevel`."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Token]] = []
        self._waiting: set[Token] = set()
        """Tokens whose callers still wait; the heap also has abandoned ones."""
        self._order = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, version: int, token: Token) -> None:
        heapq.heappush(self._heap, (version, next(self._order), token))
        self._waiting.add(token)

    def abandon(self, token: Token) -> None:
        self._waiting.discard(token)

    def release(self, safe: int) -> Iterator[Token]:
        while self._heap and self._heap[0][0] <= safe:
            yield from self._live(heapq.heappop(self._heap)[2])

    def clear(self) -> Iterator[Token]:
        while self._heap:
            yield from self._live(heapq.heappop(self._heap)[2])

    def _live(self, token: Token) -> Iterator[Token]:
        if token in self._waiting:
            self._waiting.remove(token)
            yield token


class LedShard:
    """A shard that this server leads in one epoch. `origin`: epoch of the copy from which it was
    made, or 0; `born`: epoch of its first values; `keeps`: True if the journal must keep it."""

    def __init__(
        self,
        key: Key,
        assignment: ShardAssignment,
        version: int,
        *,
        origin: int,
        born: int,
        keeps: bool,
    ) -> None:
        self.key = key
        self.assignment = assignment
        self.log = ShardLog[Record](version)
        self.born = born
        self.placement_id = ""
        self.followers: dict[Holder, Follower] = {}
        self.lost: set[Holder] = set()
        """Holders to be removed from the record: gone, or refusing the shard."""
        self.is_open = False
        self.is_deposed = False
        """True if a backup knows a later epoch."""
        self.handover = Handover()
        self._origin = origin
        self._began_at = version
        self._disk = _Disk(keeps)
        self._followers = SetFollowers(key, False, ())
        self._unreplicated_bytes = 0
        self._waiters = {level: _Waiters() for level in (AckLevel.REPLICATED, AckLevel.DURABLE)}

    @property
    def epoch(self) -> int:
        return self.assignment.epoch

    @property
    def version(self) -> int:
        return self.log.version

    # --- safe versions ---

    def _required(self) -> Iterator[Follower]:
        for follower in self.followers.values():
            if (
                follower.counts
                or follower.is_admitting
                or follower.holder in self.assignment.backups
            ):
                yield follower

    @property
    def safe_version(self) -> int | None:
        """Newest version that all required followers have; None if none is required."""
        return min((f.received for f in self._required()), default=None)

    def is_replicated(self, version: int) -> bool:
        safe = self.safe_version
        return safe is None or safe >= version

    @property
    def is_confirmed(self) -> bool:
        return all(follower.confirmed >= self.version for follower in self._required())

    @property
    def durable_version(self) -> int | None:
        """Newest version on this server's disk; None if there is none, or the record does not name
        the disk."""
        is_named = self.assignment.on_disk == self.assignment.primary.server_id
        return self._disk.version if is_named else None

    def answer_or_wait(self, token: Token, version: int, level: AckLevel) -> Effect | None:
        """The answer; None if the caller is now a waiter."""
        if self.is_deposed:
            return RefuseVersion(token, AckRefusalReason.DEPOSED)
        if level is AckLevel.DURABLE and not self._disk.keeps:
            return RefuseVersion(token, AckRefusalReason.NO_DISK)
        if self.may_acknowledge(version, level):
            return AcknowledgeVersion(token)
        self._waiters[level].add(version, token)
        return None

    def may_acknowledge(self, version: int, level: AckLevel) -> bool:
        if self.is_deposed:
            return False
        if level is AckLevel.APPLIED:
            return True
        if not self.is_replicated(version):
            return False
        durable = self.durable_version
        return level is AckLevel.REPLICATED or (durable is not None and durable >= version)

    def abandon(self, token: Token) -> None:
        for waiters in self._waiters.values():
            waiters.abandon(token)

    def release_waiters(self) -> Iterator[Token]:
        safe = self.safe_version
        reached = self.version if safe is None else safe
        yield from self._waiters[AckLevel.REPLICATED].release(reached)
        durable = self.durable_version
        if durable is not None:
            yield from self._waiters[AckLevel.DURABLE].release(min(reached, durable))

    @property
    def has_waiters(self) -> bool:
        return any(self._waiters.values())

    def refuse_waiters(self, why: AckRefusalReason, *levels: AckLevel) -> Iterator[Effect]:
        """Refuse all waiters of these levels, by default of all."""
        for level in levels or self._waiters:
            for token in self._waiters[level].clear():
                yield RefuseVersion(token, why)

    # --- records ---

    def append(self, record: Record) -> None:
        if self.followers:
            self.log.append(record)
        else:
            self.log.restart_after(record.version)

    def trim(self) -> None:
        needs = (f.needs_records_after(self.version) for f in self.followers.values())
        self.log.trim(min(needs, default=self.version))

    def report_unreplicated(self) -> Iterator[Effect]:
        if self._unreplicated_bytes != self.log.num_bytes:
            self._unreplicated_bytes = self.log.num_bytes
            yield SetUnreplicated(self.key, self.log.num_bytes)

    def report_followers(self, links: tuple[tuple[Holder, int], ...]) -> Iterator[Effect]:
        """Report the followers if they have changed. `links`: links that pushes are sent over."""
        followers = SetFollowers(self.key, bool(self.followers), links)
        if followers != self._followers:
            self._followers = followers
            yield followers

    # --- the disk ---

    def note_journaled(self, version: int) -> None:
        disk = self._disk
        is_first = disk.version is None
        disk.version, disk.keeps = max(version, disk.version or 0), True
        if is_first:
            self.note_disk_version()

    def note_disk_version(self) -> bool:
        """Let the record state the version on disk; True if it is new."""
        disk = self._disk
        if disk.version is None or disk.version <= disk.reported:
            return False
        disk.reported = disk.version
        return True

    def disk_failed(self) -> Iterator[Effect]:
        self._disk.version, self._disk.keeps = None, False
        yield from self.refuse_waiters(AckRefusalReason.NO_DISK, AckLevel.DURABLE)

    # --- copies ---

    def continues(self, copy_epoch: int, born: int, version: int) -> bool:
        """True if a copy is a prefix of this shard's history, and the log holds the rest."""
        if born != self.born or not self.log.start <= version <= self.version:
            return False
        if copy_epoch == self.epoch:
            return True
        # Until this epoch began, the copy's epoch had the same history.
        return 0 < copy_epoch == self._origin and version <= self._began_at

    @property
    def is_changing(self) -> bool:
        """True if progress of a backup may have more effects than acknowledgements."""
        a = self.assignment
        return (
            a.joining is not None
            or a.successor is not None
            or not self.is_open
            or bool(self.lost)
            or self.handover.phase is not HandoverPhase.NONE
        )

    def mark_lost(self, holder: Holder) -> None:
        """Mark a holder as lost. Pushes wait for a lost backup while the record names it."""
        self.lost.add(holder)
        if holder in self.followers:
            self.followers[holder].unlink()

    def retain_followers(self, wanted: frozenset[Holder]) -> list[Follower]:
        """Make the wanted holders followers. Remove and return the other followers, except backups
        of the record and a joiner that a write may put in step."""
        self.lost &= set(self.assignment.holders[1:])
        gone = [f for h, f in self.followers.items() if h not in wanted and not self._is_needed(f)]
        for follower in gone:
            del self.followers[follower.holder]
        new = sorted(wanted - self.followers.keys())
        self.followers.update({holder: Follower(holder) for holder in new})
        return gone

    def _is_needed(self, follower: Follower) -> bool:
        return follower.is_admitting or follower.holder in self.assignment.backups

    # --- the record ---

    def wanted_record(self, a: ShardAssignment) -> ShardAssignment:
        """The record that this primary wants. Marks what the write may do: put a joiner in step,
        hand the shard over."""
        me = a.primary
        for holder in sorted(self.lost):
            a = without_backup(a, me, holder)
        joiner = self.followers.get(a.joining) if a.joining is not None else None
        if joiner is not None and joiner.is_caught_up:
            joiner.is_admitting = True
            a = in_step(a, me, joiner.holder)
        if self._is_formed(a):
            a = filled(a, me, self.epoch)
        if self._disk.version is not None:
            a = record_disk(a, me, self._disk.reported)
        if self._is_level_with(a.successor):
            self.handover.is_writing = True
            a = exchange_primary(a, me)
        return a

    def _is_formed(self, a: ShardAssignment) -> bool:
        if a.content is ShardContent.PRESENT or a.content is ShardContent.LOST:
            return False
        joiner = self.followers.get(a.joining) if a.joining is not None else None
        if joiner is not None:
            return False
        backups = [self.followers.get(backup) for backup in a.backups]
        return all(f is not None and f.received > 0 for f in backups)

    def _is_level_with(self, successor: Holder | None) -> bool:
        if self.handover.phase is not HandoverPhase.STOPPED or successor is None:
            return False
        # A successor leads at once, so records that it has received and not read are not enough.
        return successor in self.followers and self.is_confirmed

    def written(self) -> None:
        self.handover.is_writing = False
        for follower in self.followers.values():
            follower.is_admitting = False

    # --- steps that follow ---

    def take_due_steps(self, now_s: float, announced_s: float) -> Iterator[Effect]:
        """`announced_s`: time from the notice of a successor to workers until pushes stop."""
        for follower in self.followers.values():
            if follower.holder == self.assignment.joining:
                follower.try_catch_up(self.version)
        if not self.is_open and self.assignment.content is ShardContent.PRESENT:
            self.is_open = True
            yield OpenShard(self.key)
        yield from self._handing_over(now_s, announced_s)

    def _handing_over(self, now_s: float, announced_s: float) -> Iterator[Effect]:
        successor = self.followers.get(self.assignment.successor or Holder("", ""))
        can = successor is not None and successor.phase is FollowerPhase.FOLLOWING
        match self.handover.phase:
            case HandoverPhase.NONE if can:
                self.handover = Handover(HandoverPhase.LEVELLING, now_s + announced_s)
            case HandoverPhase.LEVELLING if not can:
                self.handover.phase = HandoverPhase.NONE
            case HandoverPhase.STOPPED if not can and not self.handover.is_writing:
                # The successor was lost, so this server continues to lead. It waits while a write
                # may hand the shard over: the successor would lack later pushes.
                yield from self.keep_leading()
        # Stop pushes when the backups are level, if possible: little is left to wait for.
        over_s = now_s - self.handover.stops_from_s
        is_level = self.is_replicated(self.version) or over_s >= LEVEL_WITHIN_S
        if self.handover.is_announced and over_s >= 0 and is_level:
            self.handover.phase = HandoverPhase.STOPPING
            yield StopPushes(self.key)

    def note_newer_epoch(self, epoch: int) -> Iterator[Effect]:
        """Stop pushes and refuse waiters at once if a backup knows a newer epoch, before etcd
        delivers the record."""
        if epoch > self.epoch and not self.is_deposed:
            self.is_deposed = True
            yield StopPushes(self.key)
            yield from self.refuse_waiters(AckRefusalReason.DEPOSED)

    def keep_leading(self) -> Iterator[Effect]:
        """Resume stopped pushes: the shard is not handed over."""
        if self.handover.phase is HandoverPhase.STOPPED:
            self.handover.phase = HandoverPhase.NONE
            yield ResumePushes(self.key)

    def stopped(self, version: int) -> None:
        if self.handover.phase is HandoverPhase.STOPPING:
            assert version == self.version, "pushes are reported before the stop"
            self.handover.phase = HandoverPhase.STOPPED
