"""A store in memory with etcd's semantics, for unit tests and simulation.

Leases are checked at each call, and a waiting watch wakes when the next lease runs out. A
simulation moves its clock and calls `expire`.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from shoal_proto.errors import CorruptError, InvalidSpec, LeaseExpired, RefusedError
from shoal_server.etcd.api import (
    NO_LEASE,
    Compare,
    Delete,
    EventKind,
    Get,
    KeyValue,
    LeaseId,
    Operation,
    Put,
    RangeResult,
    Renewal,
    Revision,
    TransactionResult,
    WatchBatch,
    WatchEvent,
    holds,
)
from shoal_server.etcd.tracker import WatchTracker

MIN_TTL_S = 2.0
"""etcd's minimum by default."""


class NoRenewal:
    """No renewal: calls to this store take no time."""

    confirmed = None

    def report_alive(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    expires_s: float


class MemoryStore:
    """`api.KeyValueStore` in this process, for one event loop."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, min_ttl_s: float = MIN_TTL_S
    ) -> None:
        self._clock = clock
        self._min_ttl_s = min_ttl_s
        self._items: dict[str, KeyValue] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._lease_ids = itertools.count(1)
        self._revision = 1
        self._compacted = 0
        self._history: list[WatchEvent] = []
        self._changed = asyncio.Event()
        self._closed = False

    async def get(self, key: str) -> KeyValue | None:
        self._enter()
        return self._items.get(_checked(key))

    async def range(self, prefix: str) -> RangeResult:
        self._enter()
        return RangeResult(Revision(self._revision), self._under(prefix))

    async def keys(self, prefix: str) -> tuple[str, ...]:
        return tuple(item.key for item in (await self.range(prefix)).items)

    async def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        return (await self.transact((), (Put(key, value, lease),))).revision

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        deleted = await self.transact((), (Get(key, prefix), Delete(key, prefix)))
        return len(deleted.reads[0])

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        self._enter()
        for branch in (then, otherwise):
            self._check(branch)
        succeeded = all(self._holds(compare) for compare in compares)
        reads: list[tuple[KeyValue, ...]] = []
        events: list[WatchEvent] = []
        for operation in then if succeeded else otherwise:
            match operation:
                case Put(key=key, value=value, lease=lease):
                    events.append(self._put(key, value, lease))
                case Delete(key=key, prefix=prefix):
                    events.extend(self._delete(key, prefix=prefix))
                case Get(key=key, prefix=prefix):
                    reads.append(self._select(key, prefix=prefix))
        self._commit(events)
        return TransactionResult(succeeded, Revision(self._revision), tuple(reads))

    async def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        self._enter()
        tracker = WatchTracker(start)
        if start > self._revision + 1:
            raise CorruptError(
                "the store has lost history",
                seen=f"revision {self._revision}",
                expected=f"at least {start - 1}",
            )
        while True:
            self._enter()
            if tracker.next <= self._compacted:
                yield tracker.reset(RangeResult(Revision(self._revision), self._under(prefix)))
                continue
            batch = tracker.advance(
                event for event in self._history if event.key.startswith(prefix)
            )
            if batch is not None:
                yield batch
                continue
            await self._await_change()

    async def grant(self, ttl_s: float) -> LeaseId:
        self._enter()
        ttl_s = max(self._min_ttl_s, float(math.ceil(ttl_s)))
        lease = LeaseId(next(self._lease_ids))
        self._leases[lease] = _Lease(ttl_s, self._clock() + ttl_s)
        self._wake()
        return lease

    async def keep_alive(self, lease: LeaseId) -> float:
        self._enter()
        held = self._leases.get(lease)
        if held is None:
            return 0.0
        held.expires_s = self._clock() + held.ttl_s
        return held.ttl_s

    def renew_in_background(self, lease: LeaseId, ttl_s: float) -> Renewal:
        return NoRenewal()

    async def revoke(self, lease: LeaseId) -> None:
        self._enter()
        self._end(lease)

    async def close(self) -> None:
        self._closed = True
        self._wake()

    def expire(self) -> None:
        """End leases that have run out, as etcd does by itself."""
        now_s = self._clock()
        for lease in [each for each, held in self._leases.items() if held.expires_s <= now_s]:
            self._end(lease)

    def compact(self, revision: Revision) -> None:
        """Compact the history up to `revision`. Watches that have not delivered it get a reset."""
        self._compacted = int(revision)

    def _enter(self) -> None:
        if self._closed:
            raise RefusedError("the store is closed")
        self.expire()

    def _end(self, lease: LeaseId) -> None:
        if self._leases.pop(lease, None) is not None:
            held = [key for key, item in self._items.items() if item.lease == lease]
            self._commit([event for key in held for event in self._delete(key, prefix=False)])

    def _under(self, prefix: str) -> tuple[KeyValue, ...]:
        return tuple(self._items[key] for key in sorted(self._items) if key.startswith(prefix))

    def _select(self, key: str, *, prefix: bool) -> tuple[KeyValue, ...]:
        if prefix:
            return self._under(key)
        return (self._items[key],) if key in self._items else ()

    def _holds(self, compare: Compare) -> bool:
        if compare.prefix and compare.field == "mod_revision":
            under = self._under(compare.key)
            return all(item.mod_revision <= int(compare.expected) for item in under)
        return holds(compare, self._items.get(_checked(compare.key)))

    def _check(self, operations: Sequence[Operation]) -> None:
        puts: set[str] = set()
        for operation in operations:
            if not operation.key and not getattr(operation, "prefix", False):
                _checked(operation.key)
            if isinstance(operation, Put):
                if operation.lease != NO_LEASE and operation.lease not in self._leases:
                    raise LeaseExpired("the lease has run out", seen=str(operation.lease))
                if operation.key in puts:
                    raise RefusedError("a transaction writes a key twice", seen=operation.key)
                puts.add(operation.key)
        for operation in operations:
            if isinstance(operation, Delete):
                for key in puts:
                    if key == operation.key or (operation.prefix and key.startswith(operation.key)):
                        raise RefusedError("a transaction writes a key twice", seen=key)

    def _put(self, key: str, value: bytes, lease: LeaseId) -> WatchEvent:
        now, old = Revision(self._revision + 1), self._items.get(key)
        created, version = (old.create_revision, old.version + 1) if old else (now, 1)
        self._items[key] = KeyValue(key, bytes(value), created, now, version, lease)
        return WatchEvent(EventKind.PUT, key, bytes(value), now)

    def _delete(self, key: str, *, prefix: bool) -> list[WatchEvent]:
        now = Revision(self._revision + 1)
        gone = self._select(key, prefix=prefix)
        for item in gone:
            del self._items[item.key]
        return [WatchEvent(EventKind.DELETE, item.key, b"", now) for item in gone]

    def _commit(self, events: Sequence[WatchEvent]) -> None:
        if events:
            self._revision += 1
            self._history.extend(events)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _await_change(self) -> None:
        changed = self._changed
        ends_s = min((held.expires_s for held in self._leases.values()), default=math.inf)
        limit_s = None if ends_s == math.inf else max(0.0, ends_s - self._clock())
        try:
            async with asyncio.timeout(limit_s):
                await changed.wait()
        except TimeoutError:
            return


def _checked(key: str) -> str:
    if not key:
        raise InvalidSpec("an empty key", expected="a key of at least one character")
    return key
