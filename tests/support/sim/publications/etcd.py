"""etcd in virtual time: with latency, outages, processes that are cut off, and lost answers."""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from support.clusters.memory_store import MemoryStore
from support.sim.coroutines import result_of
from support.sim.event_loop import LoopProcess
from support.sim.replication.machine import Network
from support.sim.virtual_time import Clock

from shoal_proto.errors import Unavailable
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Delete,
    EventKind,
    Get,
    KeyValue,
    Operation,
    Put,
    RangeResult,
    Revision,
    TransactionResult,
    WatchBatch,
    WatchEvent,
    created_at,
)

T = TypeVar("T")

ETCD = "etcd"
LATENCY_S = 0.01
LOST = 0.02
"""Fraction of writes whose answer is lost; some of these are executed later."""
LATE_S = 3.0
GIVES_UP_S = 4.0
"""Time for which a client retries while it cannot reach etcd."""
POLL_S = 0.25


class SimEtcd:
    """The keys, and their history."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self.clock = clock
        self.network = network
        self.memory = MemoryStore(clock=lambda: clock.now_s)
        self.back_s = 0.0
        self.loses_answers = True
        self.history: list[WatchBatch] = []
        self.on_write: Callable[[], None] = lambda: None
        self._terms = 0
        self._known: dict[str, KeyValue] = {}
        self._revision = Revision(0)

    def elect(self) -> Sequence[Compare]:
        """Give the leader's key to a new term. Returns the fence of its transactions."""
        self.do(lambda: self.memory.transact((), (Delete(keys.LEADER),)))
        self._terms += 1
        put = Put(keys.LEADER, str(self._terms).encode())
        result = self.do(lambda: self.memory.transact((), (put,)))
        return (created_at(keys.LEADER, result.revision),)

    def do(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Execute a request now, and append its changes to the history."""
        before, revision = self._known, self._revision
        result = result_of(make())
        self._revision = result_of(self.memory.range("/none")).revision
        if self._revision == revision:
            return result
        after = self._known = self._items()
        events = [
            WatchEvent(EventKind.PUT, key, item.value, item.mod_revision)
            for key, item in after.items()
            if key not in before or before[key].mod_revision != item.mod_revision
        ]
        gone = [key for key in before if key not in after]
        revision = self._revision
        events += [WatchEvent(EventKind.DELETE, key, b"", revision) for key in gone]
        self.history.append(WatchBatch(revision, tuple(events)))
        self.on_write()
        return result

    def put_if_absent(self, put: Put) -> None:
        """Write a key unless it exists."""
        if result_of(self.memory.get(put.key)) is None:
            self.do(lambda: self.memory.transact((), (put,)))

    def items(self) -> dict[str, bytes]:
        """Return all values, by key."""
        return {key: item.value for key, item in self._known.items()}

    def _items(self) -> dict[str, KeyValue]:
        return {item.key: item for item in result_of(self.memory.range("/")).items}

    def reaches(self, process: LoopProcess) -> bool:
        """True if the process can reach etcd now."""
        is_away = self.clock.now_s < self.back_s
        return not is_away and not self.network.is_cut(process.name, ETCD)


class SimKeyspace:
    """`api.Keyspace` of one process."""

    def __init__(self, etcd: SimEtcd, process: LoopProcess) -> None:
        self._etcd = etcd
        self._process = process

    async def get(self, key: str) -> KeyValue | None:
        return await self._read(lambda: self._etcd.memory.get(key))

    async def range(self, prefix: str) -> RangeResult:
        return await self._read(lambda: self._etcd.memory.range(prefix))

    async def keys(self, prefix: str) -> tuple[str, ...]:
        return await self._read(lambda: self._etcd.memory.keys(prefix))

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        def make() -> Coroutine[Any, Any, TransactionResult]:
            return self._etcd.memory.transact(compares, then, otherwise)

        if all(isinstance(each, Get) for each in (*then, *otherwise)):
            return await self._read(make)
        return await self._write(make)

    async def watch(self, prefix: str, start: Revision) -> AsyncGenerator[WatchBatch, None]:
        history = self._etcd.history
        cursor = bisect_left(history, start, key=lambda batch: batch.revision)
        while True:
            if self._etcd.reaches(self._process):
                while cursor < len(history):
                    batch = history[cursor]
                    cursor += 1
                    events = tuple(e for e in batch.events if e.key.startswith(prefix))
                    if events and batch.revision >= start:
                        yield WatchBatch(batch.revision, events)
            await asyncio.sleep(POLL_S * (0.5 + self._etcd.clock.random.random()))

    async def _read(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await self._delivered()
        result = result_of(make())
        await self._delivered()
        return result

    async def _write(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        etcd, chance = self._etcd, self._etcd.clock.random
        await self._delivered()
        if etcd.loses_answers and chance.random() < LOST:
            if chance.random() < 0.7:
                self._make_later(make, chance.random() * LATE_S)
            raise Unavailable("the connection broke", details={"outcome": "unknown"})
        result = etcd.do(make)
        try:
            await self._delivered()
        except Unavailable:
            raise Unavailable("the answer was lost", details={"outcome": "unknown"}) from None
        return result

    def _make_later(self, make: Callable[[], Coroutine[Any, Any, T]], delay_s: float) -> None:
        """Execute a write that is in transit after a delay, even if its sender has ended."""
        self._etcd.clock.later(delay_s, lambda: self._etcd.do(make) and None)

    async def _delivered(self) -> None:
        """Wait until a message is delivered to etcd or back. Raises Unavailable."""
        chance = self._etcd.clock.random
        await asyncio.sleep(chance.random() * LATENCY_S)
        waited_s = 0.0
        while not self._etcd.reaches(self._process):
            if waited_s > GIVES_UP_S:
                raise Unavailable("etcd does not answer")
            waited_s += 0.5
            await asyncio.sleep(0.5)
