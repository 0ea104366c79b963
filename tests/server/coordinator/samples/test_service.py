"""The Samples service over real gRPC, with the client that workers use."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import pytest
from support.clusters.hooked_store import HookedStore, Transaction

from shoal_client.connection.coordinators import Coordinators
from shoal_client.progress.ranges import SampleRange
from shoal_client.progress.samples import Reserve, SampleClient, SampleLease
from shoal_proto.errors import (
    CorruptError,
    DeadlineExceeded,
    Fenced,
    InvalidSpec,
    MalformedMessage,
    NotLeader,
    ProposalConflict,
    RetryError,
    Unavailable,
)
from shoal_proto.v1 import samples_pb2, samples_pb2_grpc
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.samples.service import SamplesService
from shoal_server.coordinator.samples.stored_ledger import StoredLedger
from shoal_server.core.samples.ledger import SampleLedger
from shoal_server.core.samples.requests import LedgerCounts
from shoal_server.etcd import keys
from shoal_server.etcd.api import TransactionResult
from shoal_server.serving.rpc import bind, new_server

JOB = "digits"
NEVER_S = 3600.0


class Store(HookedStore):
    """A store that a test can make unavailable, or whose next write loses its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.lose_next_answer = False

    async def before(self, transaction: Transaction) -> None:
        if self.away:
            raise Unavailable("etcd is away")

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        if self.lose_next_answer and transaction.puts:
            self.lose_next_answer = False
            raise DeadlineExceeded("the answer was lost", details={"outcome": "unknown"})


@dataclass
class World:
    store: Store = field(default_factory=Store)
    members: set[tuple[str, str]] = field(default_factory=set)
    port: int = 0
    """Port of the last coordinator; the next one takes the same, as after a restart."""

    async def join(self, member_id: str, incarnation: str) -> None:
        self.members.add((member_id, incarnation))
        value = json.dumps({"incarnation": incarnation}).encode()
        await self.store.put(keys.member(JOB, member_id), value)

    async def expel(self, member_id: str, incarnation: str) -> None:
        self.members.discard((member_id, incarnation))
        await self.store.delete(keys.member(JOB, member_id))

    async def authorize(self, token: Token) -> None:
        if (token.member_id, token.incarnation) not in self.members:
            raise Fenced(f"{token.member_id} is not a member", seen=token.incarnation)

    @asynccontextmanager
    async def serving(
        self, write_interval_s: float = 0.01, *, beside: bool = False
    ) -> AsyncIterator[tuple[SamplesService, str]]:
        """Run one coordinator's service: (service, address). `beside`: on a port of its own."""
        server = new_server()
        port = bind(server, f"127.0.0.1:{0 if beside else self.port}")
        self.port = port
        async with SamplesService(
            self.store, self.authorize, write_interval_s=write_interval_s
        ) as service:
            samples_pb2_grpc.add_SamplesServicer_to_server(service, server)
            await server.start()
            try:
                yield service, f"127.0.0.1:{port}"
            finally:
                await server.stop(None)

    async def books(self) -> LedgerCounts:
        """Return the counts of etcd's copy."""
        async with self.serving() as (service, _):
            await service.open_existing(JOB)
            counts = service.summary(JOB)
        assert counts is not None
        return counts


class Worker:
    """A member with its client; its calls run in a thread, as in a training process."""

    def __init__(self, address: str, member_id: str, *, size: int = 100, epochs: int = 1) -> None:
        self.coordinators = Coordinators([address])
        self.token = Token(job=JOB, member_id=member_id, incarnation="1")
        self.samples = SampleClient(
            self.coordinators, lambda: self.token, dataset_size=size, num_epochs=epochs
        )

    async def lease(self, num_samples: int, done: Sequence[SampleRange] = ()) -> SampleLease:
        return await asyncio.to_thread(self.samples.lease, num_samples, done, timeout_s=2.0)

    async def held(self, num_samples: int, done: Sequence[SampleRange] = ()) -> SampleLease:
        """Lease with a reserve: the coordinator answers once the lease is in etcd."""
        reserve = Reserve(num_samples=100, step_samples=1)
        return await asyncio.to_thread(
            self.samples.lease, num_samples, done, reserve=reserve, timeout_s=2.0
        )

    async def must(self, num_samples: int, done: Sequence[SampleRange] = ()) -> SampleRange:
        lease = await self.lease(num_samples, done)
        assert lease.range is not None
        return lease.range

    async def finish(self, done: Sequence[SampleRange] = ()) -> int:
        """Train until the end; return the number of samples that this took."""
        num_samples = 0
        while not (lease := await self.lease(16, done)).exhausted:
            assert lease.range is not None
            num_samples += lease.range.stop - lease.range.start
            done = [lease.range]
        return num_samples


@pytest.fixture
def world() -> World:
    return World()


async def test_a_lost_members_samples_are_leased_to_the_others(world: World) -> None:
    """All samples are completed, and those of the lost member count as returned."""
    await world.join("a", "1")
    await world.join("b", "1")
    async with world.serving() as (service, address):
        a, b = Worker(address, "a"), Worker(address, "b")
        await a.must(30)
        first = await b.must(30)
        await world.expel("a", "1")
        service.member_lost(JOB, "a", "1")
        assert await b.finish([first]) == 70
        counts = service.summary(JOB)
    assert counts is not None
    assert (counts.completed, counts.returned, counts.ignored) == (100, 30, 0)


async def test_a_member_waits_while_others_hold_the_last_samples(world: World) -> None:
    """The answer has no range and a time after which to ask again; the ledger is not exhausted."""
    await world.join("a", "1")
    await world.join("b", "1")
    async with world.serving() as (_, address):
        await Worker(address, "a").must(100)
        lease = await Worker(address, "b").lease(10)
    assert lease.range is None
    assert not lease.exhausted
    assert lease.retry_after_s > 0


async def test_a_ledger_that_is_kept_closed_delays_no_other(world: World) -> None:
    """While one job is reset, the ledgers of others are opened and written; its own only after
    that."""
    await world.join("a", "1")
    sequences = count(1)

    async def leased(service: SamplesService, job: str) -> samples_pb2.LeaseReply:
        token = Token(job=job, member_id="a", incarnation="1")
        request = samples_pb2.LeaseRequest(
            token=token,
            sequence=next(sequences),
            num_samples=10,
            dataset_size=100,
            num_epochs=1,
            reserve_samples=100,
        )
        return await service.Lease(request, None)

    async with world.serving() as (service, _):
        async with asyncio.timeout(10.0):
            await leased(service, "open")
            async with service.closed_ledger("closed"):
                own = asyncio.create_task(leased(service, "closed"))
                assert (await leased(service, "open")).HasField("range")
                assert (await leased(service, "new")).HasField("range")
                assert not own.done() and service.summary("closed") is None
            assert (await own).HasField("range")


async def test_a_restart_continues_from_the_ledger_written_on_close(world: World) -> None:
    """The final write on close has everything: no sample is leased a second time."""
    await world.join("a", "1")
    async with world.serving(NEVER_S) as (_, address):
        worker = Worker(address, "a")
        first = await worker.must(40)
        second = await worker.must(40, [first])
    assert (await world.books()).completed == 40
    async with world.serving() as (service, _):
        assert await worker.finish([second]) == 20
        counts = service.summary(JOB)
    assert counts is not None
    assert (counts.completed, counts.repeated_max) == (100, 0)


async def test_without_a_reserve_a_coordinators_death_repeats_samples(world: World) -> None:
    """Samples whose completion is not in etcd's ledger are leased again; none is lost.

    The dead coordinator's late write fails, as its successor has written since.
    """
    await world.join("a", "1")
    async with world.serving(NEVER_S) as (dead, old_address):
        old = Worker(old_address, "a")
        first = await old.must(40)
        await until_written(world)
        second = await old.must(40, [first])
        async with world.serving(beside=True) as (service, address):
            old.coordinators.choose_next_replica(
                old_address, NotLeader("", details={"leader": address})
            )
            # The member reports only `second`, which this ledger does not have.
            assert await old.finish([second]) == 100
            counts = service.summary(JOB)
        assert counts is not None
        assert counts.completed == 100
        assert counts.repeated_max == 80
        assert dead.summary(JOB) is not None
    assert dead.summary(JOB) is None, "the deposed coordinator has closed its ledger"
    assert (await world.books()).exhausted


async def test_with_a_reserve_a_coordinators_death_repeats_nothing(world: World) -> None:
    """The member is answered only once etcd has the ledger. So the successor has either carried out
    a repeated call already, or never seen it."""
    await world.join("a", "1")
    async with world.serving() as (_, old_address):
        worker = Worker(old_address, "a")
        first = (await worker.held(40)).range
        assert first is not None
        world.store.away = True
        lost = asyncio.create_task(worker.held(40, [first]))
        done, _ = await asyncio.wait({lost}, timeout=0.2)
        assert not done, "answered before it was durable"
        async with world.serving(beside=True) as (service, address):
            worker.coordinators.choose_next_replica(
                old_address, NotLeader("", details={"leader": address})
            )
            with pytest.raises(RetryError):
                await lost
            world.store.away = False
            second = (await worker.held(60)).range
            assert second == SampleRange(0, 40, 80), "the answer to the repeated call"
            third = (await worker.held(60, [second])).range
            assert third == SampleRange(0, 80, 100)
            assert (await worker.held(0, [third])).exhausted
            counts = service.summary(JOB)
    assert counts is not None
    assert (counts.completed, counts.repeated_max) == (100, 0)


async def test_ranges_lost_before_a_repeated_request_are_in_the_next_answer(world: World) -> None:
    """The repeated request leases nothing, so the client makes another one. Its result names the
    range that the member no longer holds, and must not begin."""
    await world.join("a", "1")
    await world.join("b", "1")
    async with world.serving() as (_, address):
        a = Worker(address, "a")
        first = (await a.held(40)).range
    reserve = Reserve(num_samples=100, step_samples=1)
    with pytest.raises(RetryError):
        await asyncio.to_thread(a.samples.lease, 10, reserve=reserve, timeout_s=0.2)
    async with world.serving() as (service, address):
        await service.open_existing(JOB)
        service.member_lost(JOB, "a", "1")
        assert await Worker(address, "b").must(100) == SampleRange(0, 0, 100)
        lease = await a.held(10)
    assert (lease.range, lease.not_held) == (None, (first,))


async def test_a_call_that_waits_when_the_ledger_is_closed_is_repeated(world: World) -> None:
    """The coordinator refuses it with NotLeader; here the same one leads again."""
    await world.join("a", "1")
    async with world.serving() as (service, address):
        worker = Worker(address, "a")
        await worker.held(10)
        world.store.away = True
        waits = asyncio.create_task(worker.held(10))
        await asyncio.wait({waits}, timeout=0.1)
        await service.hand_over()
        world.store.away = False
        lease = await waits
    assert lease.range == SampleRange(0, 10, 20)


async def test_a_wait_for_a_ledger_that_cannot_be_written_ends_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member repeats its request, instead of waiting for a write that is not made."""
    write, num_written = StoredLedger.write, 0

    async def fail_once(stored: StoredLedger, ledger: SampleLedger, *, whole: bool = False) -> bool:
        nonlocal num_written
        num_written += 1
        if num_written == 1:
            raise InvalidSpec("a value that etcd refuses")
        return await write(stored, ledger, whole=whole)

    monkeypatch.setattr(StoredLedger, "write", fail_once)
    await world.join("a", "1")
    async with world.serving() as (_, address):
        lease = await Worker(address, "a").held(10)
    assert lease.range == SampleRange(0, 0, 10)


async def test_members_that_died_with_the_coordinator_lose_their_ranges(world: World) -> None:
    """Ranges of members that are not in etcd when the ledger is opened are returned."""
    await world.join("a", "1")
    await world.join("b", "1")
    async with world.serving() as (_, address):
        await Worker(address, "a").must(60)
    await world.expel("a", "1")
    async with world.serving() as (service, address):
        assert await Worker(address, "b").finish() == 100
        counts = service.summary(JOB)
    assert counts is not None
    assert counts.returned == 60


async def test_a_member_lost_while_its_ledger_is_closed_loses_its_ranges(world: World) -> None:
    """The ranges are returned when the ledger is opened, although the member's key is still in
    etcd."""
    await world.join("a", "1")
    async with world.serving() as (_, address):
        await Worker(address, "a").must(60)
    async with world.serving() as (service, _):
        service.member_lost(JOB, "a", "1")
        await service.open_existing(JOB)
        counts = service.summary(JOB)
    assert counts is not None
    assert (counts.in_flight, counts.returned) == (0, 60)


async def test_a_fenced_members_report_is_refused_and_counted(world: World) -> None:
    """The report is refused with Fenced, and its samples count as ignored."""
    await world.join("a", "1")
    async with world.serving() as (service, address):
        worker = Worker(address, "a")
        held = await worker.must(10)
        await world.expel("a", "1")
        service.member_lost(JOB, "a", "1")
        with pytest.raises(Fenced, match="a is not a member"):
            await worker.lease(10, [held])
        counts = service.summary(JOB)
    assert counts is not None
    assert (counts.completed, counts.returned, counts.ignored) == (0, 10, 10)


async def test_a_member_lost_while_its_call_waits_gets_no_range(world: World) -> None:
    """The call is refused: a range leased after the loss would never be returned."""
    await world.join("a", "1")
    opening, go_on = asyncio.Event(), asyncio.Event()

    async def authorize(token: Token) -> None:
        opening.set()
        await go_on.wait()

    server = new_server()
    port = bind(server, "127.0.0.1:0")
    async with SamplesService(world.store, authorize) as service:
        samples_pb2_grpc.add_SamplesServicer_to_server(service, server)
        await server.start()
        call = asyncio.create_task(Worker(f"127.0.0.1:{port}", "a").lease(10))
        await opening.wait()
        service.member_lost(JOB, "a", "1")
        go_on.set()
        with pytest.raises(Fenced, match="declared lost"):
            await call
        counts = service.summary(JOB)
        await server.stop(None)
    assert counts is not None
    assert counts.in_flight == 0


async def test_members_with_another_dataset_size_or_epochs_are_refused(world: World) -> None:
    """The job's first request fixes size and epochs; the refusal names both sides."""
    await world.join("a", "1")
    await world.join("b", "1")
    async with world.serving() as (_, address):
        await Worker(address, "a", size=100).must(10)
        with pytest.raises(ProposalConflict) as refusal:
            await Worker(address, "b", size=99, epochs=2).lease(10)
    assert "99" in refusal.value.seen
    assert "100" in refusal.value.expected
    assert "drop_last=True dataset_size depends on the global batch size" in refusal.value.fix


async def test_many_leases_make_few_writes(world: World) -> None:
    """Writes are coalesced: a hundred leases within one interval are two writes."""
    await world.join("a", "1")
    async with world.serving(NEVER_S) as (_, address):
        worker = Worker(address, "a", size=1000)
        done: list[SampleRange] = []
        for _ in range(100):
            done = [await worker.must(10, done)]
    entry = await world.store.get(keys.sample_ledger(JOB))
    assert entry is not None
    assert entry.version == 2, "one for the first lease, one on close"
    assert (await world.books()).completed == 990


async def test_leasing_continues_while_etcd_is_away(world: World) -> None:
    """Leases without a reserve are granted while etcd is unavailable, and written once etcd is
    back."""
    await world.join("a", "1")
    async with world.serving() as (_, address):
        worker = Worker(address, "a")
        first = await worker.must(50)
        world.store.away = True
        second = await worker.must(50, [first])
        world.store.away = False
        await worker.lease(0, [second])
    assert (await world.books()).exhausted


async def test_a_write_whose_answer_was_lost_is_read_back(world: World) -> None:
    """The service finds its own write in etcd and continues from it."""
    await world.join("a", "1")
    world.store.lose_next_answer = True
    async with world.serving() as (service, address):
        worker = Worker(address, "a")
        await worker.finish()
        assert service.summary(JOB) is not None
    assert (await world.books()).exhausted


async def test_an_unreadable_ledger_is_not_replaced(world: World) -> None:
    """The member gets CorruptError; the key is left as it is."""
    await world.join("a", "1")
    await world.store.put(keys.sample_ledger(JOB), b"{}")
    async with world.serving() as (_, address):
        with pytest.raises(CorruptError, match="cannot be read"):
            await Worker(address, "a").lease(1)
    entry = await world.store.get(keys.sample_ledger(JOB))
    assert entry is not None
    assert entry.value == b"{}"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"sequence": 0}, MalformedMessage),
        ({"dataset_size": 0}, InvalidSpec),
        ({"num_epochs": 0}, InvalidSpec),
        ({"held": [samples_pb2.SampleRange()] * 2000}, MalformedMessage),
    ],
)
async def test_an_invalid_request_is_refused(
    world: World, changes: dict[str, object], kind: type[Exception]
) -> None:
    """No ledger is opened for it."""
    await world.join("a", "1")
    fields = {"sequence": 1, "dataset_size": 10, "num_epochs": 1, "num_samples": 1, **changes}
    token = Token(job=JOB, member_id="a", incarnation="1")
    request = samples_pb2.LeaseRequest(token=token, **fields)  # type: ignore[arg-type]
    async with world.serving() as (service, address):
        coordinators = Coordinators([address])
        with pytest.raises(kind):
            await asyncio.to_thread(
                coordinators.call,
                lambda channel: samples_pb2_grpc.SamplesStub(channel).Lease,
                request,
                timeout_s=2.0,
            )
        assert service.summary(JOB) is None


async def test_a_report_that_failed_is_sent_with_the_next_lease(world: World) -> None:
    """The client keeps completed ranges that it could not report."""
    await world.join("a", "1")
    async with world.serving() as (_, address):
        worker = Worker(address, "a", size=10)
        held = await worker.must(10)
    with pytest.raises(RetryError):
        await asyncio.to_thread(worker.samples.report, [held], timeout_s=0.2)
    async with world.serving():
        assert (await worker.lease(0)).exhausted


async def test_a_request_for_no_samples_leaves_none_held(world: World) -> None:
    """The client first repeats a request that was not answered. Its answer has a range, which the
    caller does not want any more."""
    await world.join("a", "1")
    async with world.serving() as (_, address):
        worker = Worker(address, "a", size=10)
    with pytest.raises(RetryError):
        await asyncio.to_thread(worker.samples.lease, 5, timeout_s=0.2)
    async with world.serving():
        assert (await worker.lease(0)).range is None
        assert worker.samples.held == ()
        assert await worker.must(10) == SampleRange(0, 0, 10)


async def until_written(world: World) -> None:
    """Wait until etcd has a ledger."""
    async with asyncio.timeout(5):
        async for _ in world.store.watch(keys.sample_ledger(JOB), 1):  # type: ignore[arg-type]
            return


async def test_a_new_leader_reads_a_ledger_for_a_snapshot_before_it_leases(world: World) -> None:
    """The result is None for a job without a ledger."""
    await world.join("a", "1")
    async with world.serving() as (_, address):
        worker = Worker(address, "a")
        await worker.must(10, [await worker.must(30)])
    async with world.serving() as (service, _):
        books = await service.ledger_json(JOB)
        assert books is not None
        assert SampleLedger.from_json(books).counts().completed == 30
        assert await service.ledger_json("other") is None
        assert service.summary(JOB) is None


async def test_a_host_may_be_up_for_years(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Released coordinators accept sequence numbers up to 2**53 - 1; this coordinator accepts and
    keeps those of released members, which are nanoseconds."""
    years_ns = 10 * 365 * 24 * 3600 * 10**9
    monkeypatch.setattr("shoal_client.progress.samples.time.monotonic_ns", lambda: years_ns)
    await world.join("a", "1")
    await world.join("b", "1")
    released = samples_pb2.LeaseRequest(
        token=Token(job=JOB, member_id="b", incarnation="1"),
        sequence=years_ns,
        num_samples=10,
        dataset_size=100,
        num_epochs=1,
        reserve_samples=10,
    )
    async with world.serving() as (_, address):
        worker = Worker(address, "a")
        await worker.held(10)
        await asyncio.to_thread(
            worker.coordinators.call,
            lambda channel: samples_pb2_grpc.SamplesStub(channel).Lease,
            released,
            timeout_s=2.0,
        )
    async with world.serving() as (service, _):
        ledger = await service.ledger_json(JOB)
    assert ledger is not None
    assert ledger["members"]["a"]["sequence"] < 2**53
    assert ledger["members"]["b"]["sequence"] == years_ns
