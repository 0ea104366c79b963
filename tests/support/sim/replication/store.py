"""etcd in virtual time for servers and coordinators, with real transactions on real records."""

from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from support.clusters.memory_store import MemoryStore
from support.sim.coroutines import result_of
from support.sim.replication.machine import Network, SimProcess
from support.sim.virtual_time import Clock

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, Get, KeyValue, Put, Revision, unchanged_since
from shoal_server.etcd.mirror import MirroredKey
from shoal_server.etcd.records import assignments as records

ETCD = "etcd"
TIMEOUT_S = 1.0
LATE_NEWS_S = 0.3
"""Longest delay of each record when a watch receives those that it missed."""
LOST_ANSWERS = 0.01
LATE_WRITES = 0.1
"""Fraction of the requests which find etcd unreachable that are still executed later."""

T = TypeVar("T")


class Stored(NamedTuple):
    """A record as it was read, with its revision and its placement of the job."""

    assignment: ShardAssignment
    revision: Revision
    placement_id: str


def path(key: Key, placement_id: str) -> str:
    return keys.shard_assignment(key[0], placement_id, key[1])


def key_of(entry: str) -> Key:
    job, _, shard_id = entry.removeprefix(keys.ASSIGNMENTS).split("/")
    return job, int(shard_id)


@lru_cache(maxsize=256)
def _decoded(key: str, value: bytes) -> tuple[ShardAssignment, str]:
    stored = records.parse_shard(MirroredKey(key, value, Revision(1)))
    return stored.assignment, stored.placement_id


def decode(item: KeyValue) -> Stored:
    assignment, placement_id = _decoded(item.key, item.value)
    return Stored(assignment, item.mod_revision, placement_id)


class SimStore:
    """Contents of etcd, its watches, and the test's view of the records."""

    def __init__(self, clock: Clock, network: Network) -> None:
        self.clock = clock
        self.network = network
        self.memory = MemoryStore(clock=lambda: clock.now_s, min_ttl_s=0.0)
        self.back_s = 0.0
        self.loses_answers = True
        self.replays_history = False
        """True if a watch that was cut off receives all missed records, one by one."""
        self.placement_id = "1"
        """Run of the job."""
        self.records: dict[Key, ShardAssignment] = {}
        """The current records."""
        self.listed_until_s: dict[Holder, float] = {}
        """Expiry of the lease of each server that ever registered."""
        self.on_record: Callable[[Key, ShardAssignment | None, ShardAssignment], None] = (
            lambda key, old, new: None
        )
        self._watches: list[RecordWatch] = []
        self._revision = 0

    @property
    def is_away(self) -> bool:
        return self.clock.now_s < self.back_s

    def place(self, key: Key, assignment: ShardAssignment) -> None:
        value = records.encode_shard(self.placement_id, assignment)
        self.carry_out(lambda memory: memory.put(path(key, self.placement_id), value))

    def begin_anew(self, fresh: Mapping[Key, ShardAssignment]) -> None:
        """Begin another placement of the job, with these records in place of all others."""
        self.placement_id = str(int(self.placement_id) + 1)
        self.records.clear()
        puts = [
            Put(path(key, self.placement_id), records.encode_shard(self.placement_id, assignment))
            for key, assignment in fresh.items()
        ]

        async def work(memory: MemoryStore) -> None:
            await memory.transact((), [Delete(keys.ASSIGNMENTS, prefix=True)])
            await memory.transact((), puts)

        self.carry_out(work)

    def carry_out(self, work: Callable[[MemoryStore], Coroutine[Any, Any, T]]) -> T:
        """Execute the request now, and notify all watches."""
        outcome = result_of(work(self.memory))
        found = result_of(self.memory.range(keys.ASSIGNMENTS))
        changed = [item for item in found.items if item.mod_revision > self._revision]
        self._revision = found.revision
        for item in changed:
            key, new = key_of(item.key), decode(item).assignment
            old = self.records.get(key)
            self.records[key] = new
            self.on_record(key, old, new)
        if changed:
            self._watches = [watch for watch in self._watches if watch.process.alive]
            for watch in self._watches:
                watch.notify(changed)
        return outcome

    def listed(self) -> Mapping[str, bytes]:
        """Return the records of the registered servers, by server id."""
        found = result_of(self.memory.range(keys.SERVERS))
        return {item.key.removeprefix(keys.SERVERS): item.value for item in found.items}

    def watch(self, process: SimProcess, note: Callable[[KeyValue], None]) -> "RecordWatch":
        """Send a process every current record, and every newer one."""
        watch = RecordWatch(self, process, note)
        self._watches.append(watch)
        watch.reconnect()
        return watch

    def mended(self) -> None:
        """Reconnect watches that were cut off."""
        for watch in self._watches:
            watch.mended()


class RecordWatch:
    """Watch with delays, in order. After a cut it delivers the current records, or all missed
    ones."""

    def __init__(
        self, store: SimStore, process: SimProcess, note: Callable[[KeyValue], None]
    ) -> None:
        self.process = process
        self._store = store
        self._note = note
        self._coming: deque[list[KeyValue]] = deque()
        self._last_s = 0.0
        self._is_broken = True
        self._missed: list[list[KeyValue]] | None = None
        """Records missed during a cut; None: the current records are to be read."""

    def notify(self, items: list[KeyValue], *, late_s: float = 0.0) -> None:
        if self._is_broken:
            if self._missed is not None:
                self._missed.append(items)
            return
        now_s = self._store.clock.now_s
        self._last_s = late_s + max(
            self._last_s, now_s + self._store.network.delay_s(self.process.name, ETCD)
        )
        self._coming.append(items)
        self.process.act(self._last_s - now_s, self._deliver)

    def _deliver(self) -> None:
        if self._is_broken or not self._coming:
            return
        if self._store.is_away or self._store.network.is_cut(self.process.name, ETCD):
            self._is_broken = True
            if self._missed is not None:
                self._missed = [*self._coming, *self._missed]
            self._coming.clear()
            self.reconnect()
            return
        for item in self._coming.popleft():
            self._note(item)

    def mended(self) -> None:
        """Reconnect if the watch was cut off."""
        if self._is_broken:
            self.reconnect()

    def reconnect(self) -> None:
        wait_s = max(0.0, self._store.back_s - self._store.clock.now_s)
        self.process.act(wait_s + self._store.clock.random.uniform(0.01, 0.3), self._read)

    def _read(self) -> None:
        if not self._is_broken:
            return
        if self._store.is_away:
            self.reconnect()
        elif not self._store.network.is_cut(self.process.name, ETCD):
            self._is_broken = False
            missed, self._missed = self._missed, [] if self._store.replays_history else None
            if missed is None:
                for item in result_of(self._store.memory.range(keys.ASSIGNMENTS)).items:
                    self._note(item)
                return
            for items in missed:
                self.notify(items, late_s=LATE_NEWS_S * self._store.clock.random.random())


class StoreClient:
    """etcd as one process reaches it."""

    def __init__(self, store: SimStore, process: SimProcess) -> None:
        self._store = store
        self._process = process

    def ask(
        self,
        work: Callable[[MemoryStore], Coroutine[Any, Any, T]],
        answered: Callable[[T], None],
        failed: Callable[[bool], None],
    ) -> None:
        """Send a request, and call either `answered` or `failed`. `failed` gets True if the request
        may have been executed, or may be later."""
        store, process = self._store, self._process
        chance = store.clock.random

        def fail(is_unknown: bool) -> None:
            process.act(TIMEOUT_S, lambda: failed(is_unknown))

        def arrive() -> None:
            if store.is_away or store.network.is_cut(process.name, ETCD):
                late = chance.random() < LATE_WRITES
                if late:
                    wait_s = max(0.0, store.back_s - store.clock.now_s)
                    store.clock.later(wait_s + 0.3 * chance.random(), apply_late)
                fail(late or chance.random() < 0.5)
                return
            outcome = store.carry_out(work)
            lost = store.loses_answers and chance.random() < LOST_ANSWERS
            store.clock.later(delay_s(), lambda: answer(outcome, lost))

        def apply_late() -> None:
            if not store.is_away and not store.network.is_cut(process.name, ETCD):
                store.carry_out(work)

        def answer(outcome: T, lost: bool) -> None:
            if lost or store.network.is_cut(process.name, ETCD):
                fail(True)
            else:
                process.do(lambda: answered(outcome))

        def delay_s() -> float:
            return store.network.delay_s(process.name, ETCD)

        store.clock.later(delay_s(), arrive)

    def replace(
        self,
        key: Key,
        new: ShardAssignment,
        known: Stored,
        answered: Callable[[bool, Stored | None], None],
        failed: Callable[[bool], None],
    ) -> None:
        """Compare and swap; answers if it succeeded, and with the current record."""

        async def work(memory: MemoryStore) -> tuple[bool, Stored | None]:
            at = path(key, known.placement_id)
            put = Put(at, records.encode_shard(known.placement_id, new))
            result = await memory.transact([unchanged_since(at, known.revision)], [put], [Get(at)])
            if result.succeeded:
                return True, Stored(new, result.revision, known.placement_id)
            return False, decode(result.reads[0][0]) if result.reads[0] else None

        self.ask(work, lambda outcome: answered(*outcome), failed)

    def read(
        self,
        key: Key,
        answered: Callable[[Stored | None], None],
        failed: Callable[[bool], None],
    ) -> None:
        async def work(memory: MemoryStore) -> Stored | None:
            item = await memory.get(path(key, self._store.placement_id))
            return None if item is None else decode(item)

        self.ask(work, answered, failed)
