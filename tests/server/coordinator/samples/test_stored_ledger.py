"""A ledger in etcd, written as a base and deltas: a reader finds the result of a whole write."""

import json
import random

import pytest
from support.clusters.hooked_store import HookedStore, Transaction
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import DeadlineExceeded, JobQuarantined, RetryError, Unavailable
from shoal_server.coordinator.samples.stored_ledger import (
    COMPRESSED_FROM_BYTES,
    MAX_DELTAS,
    StoredLedger,
)
from shoal_server.core.samples.ledger import SampleLedger
from shoal_server.core.samples.requests import LedgerRange, SampleRequest
from shoal_server.etcd import keys
from shoal_server.etcd.api import TransactionResult
from shoal_server.etcd.leader_store import LeaderStore

JOB = "digits"
SEEDS = 20


def stored_in(store: MemoryStore) -> StoredLedger:
    return StoredLedger(LeaderStore(store, tuple, print), JOB)


class FailingStore(HookedStore):
    """Store that is unavailable or loses an answer at times drawn from a seed."""

    def __init__(self, choices: random.Random) -> None:
        super().__init__()
        self._choices = choices
        self._drawn = 1.0
        self.fails = 0.0

    async def before(self, transaction: Transaction) -> None:
        self._drawn = self._choices.random()
        if self._drawn < self.fails / 2:
            raise Unavailable("etcd is away")

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        if self._drawn < self.fails:
            raise DeadlineExceeded("the answer was lost", details={"outcome": "unknown"})


class Workers:
    """Members that lease, report, and are lost."""

    def __init__(self, ledger: SampleLedger, choices: random.Random, term: int) -> None:
        self.ledger, self._choices, self._incarnation = ledger, choices, f"of-term-{term}"
        self._held: dict[str, LedgerRange] = {}
        self._sequence = 0

    def step(self) -> None:
        name = f"w{self._choices.randrange(6)}"
        if self._choices.random() < 0.05:
            self.ledger.give_back(name)
            self._held.pop(name, None)
            return
        self._sequence += 1
        done = [self._held.pop(name)] if name in self._held else []
        request = SampleRequest(
            member_id=name,
            incarnation=self._incarnation,
            sequence=self._sequence,
            completed=done,
            num_samples=self._choices.randrange(1, 50),
        )
        if (found := self.ledger.answer(request).range) is not None:
            self._held[name] = found


async def newest(store: MemoryStore) -> SampleLedger | None:
    return await stored_in(store).read()


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_reader_finds_the_last_whole_write(seed: int) -> None:
    """Writes fail, answers are lost, and successors take over, after which writes are refused."""
    choices = random.Random(seed)
    store = FailingStore(choices)
    written = SampleLedger(dataset_size=2000, num_epochs=50)
    for term in range(3):
        stored = stored_in(store)
        ledger = await stored.read() or written
        # The successor reads the last write, even if its answer was lost.
        assert ledger.to_json() == written.to_json()
        workers = Workers(ledger, choices, term)
        store.fails = 0.2
        for _ in range(choices.randrange(1, 2 * MAX_DELTAS)):
            for _ in range(choices.randrange(1, 4)):
                workers.step()
            before = written.to_json()
            try:
                assert await stored.write(ledger, whole=choices.random() < 0.02)
            except RetryError:
                found = await read_without_failures(store, choices)
                assert found is None or found.to_json() in (before, ledger.to_json())
                continue
            written = SampleLedger.from_json(ledger.to_json())
            assert len(await store.keys(keys.sample_deltas(JOB))) <= MAX_DELTAS
        store.fails = 0.0
        workers.step()
        successor = stored_in(store)
        if (taken := await successor.read()) is not None:
            written = SampleLedger.from_json(taken.to_json())
            assert await successor.write(taken)
            assert not await stored.write(ledger), "it was replaced"
            assert await successor.write(taken)


async def read_without_failures(store: FailingStore, choices: random.Random) -> SampleLedger | None:
    fails, store.fails = store.fails, 0.0
    try:
        return await newest(store)
    finally:
        store.fails = fails


async def test_most_writes_are_small() -> None:
    """A hundred writes of fifty members: the whole ledger once, then only changes."""
    store, ledger = MemoryStore(), SampleLedger(dataset_size=10**6, num_epochs=2)
    stored = stored_in(store)
    for sequence in range(1, 101):
        for member in range(50):
            request = SampleRequest(
                member_id=f"w{member}", incarnation="1", sequence=sequence, num_samples=64
            )
            ledger.answer(request)
        assert await stored.write(ledger)
    deltas = (await store.range(keys.sample_deltas(JOB))).items
    assert len(deltas) == 99
    assert max(len(each.value) for each in deltas) < 500
    found = await newest(store)
    assert found is not None
    assert found.to_json() == ledger.to_json()


async def test_deltas_of_another_base_are_not_read() -> None:
    """A restored snapshot of etcd may leave deltas of another base."""
    store, ledger = MemoryStore(), SampleLedger(dataset_size=100, num_epochs=1)
    stored = stored_in(store)
    await stored.write(ledger)
    ledger.ignore([LedgerRange(0, 0, 7)])
    await stored.write(ledger)
    assert await store.keys(keys.sample_deltas(JOB))
    theirs = SampleLedger(dataset_size=100, num_epochs=1)
    theirs.ignore([LedgerRange(0, 0, 3)])
    await store.put(keys.sample_ledger(JOB), json.dumps(theirs.to_json()).encode())
    found = await newest(store)
    assert found is not None
    assert found.counts().ignored == 3


@pytest.mark.long
async def test_a_large_ledger_is_compressed() -> None:
    """etcd accepts values up to 1.5 MB; the ledger of ten thousand members is smaller."""
    store, ledger = MemoryStore(), SampleLedger(dataset_size=10**9, num_epochs=1)
    for member in range(10_000):
        request = SampleRequest(
            member_id=f"host-{member:05}-0", incarnation=f"{member:016x}", sequence=1, num_samples=8
        )
        ledger.answer(request)
    assert await stored_in(store).write(ledger)
    entry = await store.get(keys.sample_ledger(JOB))
    assert entry is not None
    assert len(json.dumps(ledger.to_json())) > COMPRESSED_FROM_BYTES > len(entry.value) / 2
    found = await newest(store)
    assert found is not None
    assert found.to_json() == ledger.to_json()


@pytest.mark.parametrize("delta", [b"", b"\x01\x02", b"\xff" * 30])
async def test_an_unreadable_delta_quarantines_the_job(delta: bytes) -> None:
    """A ledger with an unreadable delta is not read: without the delta, it would be read as it was
    earlier."""
    store, ledger = MemoryStore(), SampleLedger(dataset_size=100, num_epochs=1)
    stored = stored_in(store)
    await stored.write(ledger)
    ledger.ignore([LedgerRange(0, 0, 7)])
    await stored.write(ledger)
    (key,) = await store.keys(keys.sample_deltas(JOB))
    await store.put(key, delta)
    with pytest.raises(JobQuarantined, match="samples"):
        await newest(store)
