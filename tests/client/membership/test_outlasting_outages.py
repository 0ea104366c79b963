"""Members wait for an absent coordinator without a limit."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.clusters.coordinator_world import Served, entered, propose, served
from support.clusters.memory_store import MemoryStore
from support.processes.load import unhurried

from shoal.strategies.asynchronous.sample_leases import Leases
from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership import member_core
from shoal_client.progress.clocks import Clock
from shoal_client.progress.ranges import SampleRange, joined
from shoal_client.progress.samples import Reserve, SampleLease
from shoal_proto import back_off
from shoal_proto.errors import Fenced, JobFinished, MemberDrained, Unavailable
from shoal_proto.v1 import clocks_pb2
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.core.limits import Limits

LIMITS = Limits(heartbeat_s=unhurried(0.1), join_s=unhurried(3.0))
LONGER_THAN_ANY_LIMIT_S = 1.5 * LIMITS.join_s


@pytest.fixture(autouse=True)
def clients_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the clients' pauses, so that a roster is not answered while a client pauses."""
    for name in ("PROMPT_LONGEST_S", "LONGEST_S"):
        monkeypatch.setattr(back_off, name, LIMITS.prepare_s / 8)


@asynccontextmanager
async def away(store: MemoryStore, world: Served) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The coordinator is away until the yielded function is called, which starts one at its
    address."""
    await world.coordinator.step_down()
    await world.server.stop(None)
    back = served(store, LIMITS, address=world.address)
    came = False

    async def come_back() -> None:
        nonlocal came
        await back.__aenter__()
        came = True

    try:
        yield come_back
    finally:
        for client in world.clients:
            await asyncio.to_thread(client.close)
        if came:
            await back.__aexit__(None, None, None)


async def outlasts(waiting: "asyncio.Future[Any]", come_back: Callable[[], Awaitable[None]]) -> Any:
    """Result of the wait, which must not have ended before a coordinator is back."""
    ended, _ = await asyncio.wait({waiting}, timeout=LONGER_THAN_ANY_LIMIT_S)
    assert not ended, f"it gave up: {waiting.exception()!r}"
    await come_back()
    async with asyncio.timeout(unhurried(10.0)):
        return await waiting


@pytest.mark.long
async def test_a_trainers_report_arrives_when_a_coordinator_is_back() -> None:
    store = MemoryStore()
    async with served(store, LIMITS) as world:
        client = world.client("a", desired=1)
        await asyncio.to_thread(client.join)
        async with away(store, world) as come_back:
            proposed = asyncio.ensure_future(asyncio.to_thread(propose, client))
            await outlasts(proposed, come_back)
            record = await entered(client, 0)
            assert record.roster.generation == 1


@pytest.mark.long
async def test_a_job_that_ends_during_an_outage_is_finished_when_a_coordinator_is_back() -> None:
    """Otherwise the job would be recorded as failed, and a rerun would repeat its steps."""
    store = MemoryStore()
    async with served(store, LIMITS) as world:
        (client,) = await world.training("a")
        async with away(store, world) as come_back:
            left = asyncio.to_thread(client.leave, completed=True, reason="all is trained")
            assert await outlasts(asyncio.ensure_future(left), come_back), "no acknowledgement"
            with pytest.raises(JobFinished, match="all is trained"):
                await asyncio.to_thread(world.client("late").join)


@pytest.mark.long
async def test_a_wait_for_the_next_generation_continues_through_an_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_core, "ADMISSION_S", 0.1)
    store = MemoryStore()
    async with served(store, LIMITS) as world:
        client = await world.joined("a", desired=2, low=2)
        async with away(store, world) as come_back:
            waits = asyncio.ensure_future(asyncio.to_thread(client.await_generation, 0))
            ended, _ = await asyncio.wait({waits}, timeout=LONGER_THAN_ANY_LIMIT_S)
            assert not ended, f"it gave up: {waits.exception()!r}"
            await come_back()
            other = world.client("b", desired=2, low=2)
            await asyncio.to_thread(other.join)
            await asyncio.to_thread(propose, other)
            async with asyncio.timeout(unhurried(10.0)):
                assert (await waits).roster.generation == 1


@pytest.mark.long
async def test_a_broken_generation_is_reported_when_a_coordinator_is_back() -> None:
    """Two members report the same failed collective, and neither gets the other's loss as an
    error."""
    store = MemoryStore()
    async with served(store, LIMITS) as world:
        members = await world.training("a", "b")

        def recover(name: int) -> bool:
            member = members[name]
            member.report_broken("a collective failed")
            return member.await_break(1, LIMITS.collective_s)

        async with away(store, world) as come_back:
            both = asyncio.gather(*(asyncio.to_thread(recover, name) for name in range(2)))
            assert await outlasts(both, come_back) == [True, True]


BATCH = 8


class AwaySamples:
    """The coordinator's samples, available once `back` is set."""

    num_samples = 1000
    has_unreported = False

    def __init__(self) -> None:
        self.coordinators = Coordinators(["127.0.0.1:1"])
        self.back = threading.Event()
        self.attempts = 0
        self.next = 0
        self.completed: list[SampleRange] = []
        self.error: Exception = Unavailable("nobody is there")
        self.held: tuple[SampleRange, ...] = ()

    def lease(
        self,
        num_samples: int,
        completed: Iterable[SampleRange] = (),
        *,
        reserve: Reserve | None = None,
        timeout_s: float = 0.0,
    ) -> SampleLease:
        self.attempts += 1
        self.completed += completed
        if not self.back.is_set():
            raise self.error
        span = SampleRange(0, self.next, self.next + num_samples) if num_samples else None
        self.next += num_samples
        return SampleLease(range=span, exhausted=False, retry_after_s=0.0)

    def report(
        self,
        completed: Iterable[SampleRange] = (),
        *,
        reserve: Reserve | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self.lease(0, completed)


def test_samples_are_requested_until_they_arrive() -> None:
    """The trainer's loop continues meanwhile, and earlier completed samples are reported once."""
    samples = AwaySamples()
    leases = Leases(samples, BATCH)  # type: ignore[arg-type]
    done = SampleRange(0, 100, 108)
    leases.done(done)
    spans = iter(leases)
    assert next(spans) is None
    assert next(spans) is None
    samples.back.set()
    while (span := next(spans)) is None:
        continue
    assert span == SampleRange(0, 0, BATCH)
    assert samples.completed == [done]
    leases.close()


def test_training_on_leased_samples_continues_through_an_outage() -> None:
    """The samples are reported when a coordinator is back, each range once."""
    samples = AwaySamples()
    samples.back.set()
    leases = Leases(samples, BATCH)  # type: ignore[arg-type]
    spans = iter(leases)
    while (first := next(spans)) is None:
        continue
    samples.back.clear()
    leases.done(first)
    trained = [first]
    while (span := next(spans)) is not None:
        trained.append(span)
        leases.done(span)
    assert len(trained) >= 2, "one batch ahead"
    samples.back.set()
    while next(spans) is None:
        continue
    leases.close()
    assert sorted(joined(samples.completed)) == joined(trained)
    assert len(samples.completed) == len(set(samples.completed)), "each reported once"


def test_samples_are_refused_at_once() -> None:
    """A member that was lost meanwhile does not repeat its request."""
    samples = AwaySamples()
    samples.error = Fenced("lost")
    leases = Leases(samples, BATCH)  # type: ignore[arg-type]
    with pytest.raises(Fenced):
        list(iter(leases))
    leases.close()


class AwayClocks(Coordinators):
    """Answers after a number of calls that find no coordinator."""

    def __init__(self, num_silent: int) -> None:
        super().__init__(["127.0.0.1:1"])
        self.left = num_silent

    def call(self, method_of: Any, request: Any, *, timeout_s: float, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise Unavailable("nobody is there")
        return clocks_pb2.AdvanceReply(allowed=True, clock=3)


def test_a_clock_waits_for_a_coordinator_without_a_limit() -> None:
    """The clock's own limit is for waits on other members, and an outage does not count towards
    it."""
    coordinators = AwayClocks(6)
    clock = Clock(coordinators, Token, bound=1, wait_s=0.01)
    assert clock.begin() is True
    assert clock.round == 3
    assert coordinators.left == -1


def test_a_closed_connection_ends_every_wait() -> None:
    coordinators = AwayClocks(10**9)
    clock = Clock(coordinators, Token, bound=1)
    closing = threading.Timer(0.1, coordinators.close)
    closing.start()
    with pytest.raises(Unavailable):
        clock.begin()
    closing.join()


def test_a_drain_ends_a_wait_for_clocks_without_a_coordinator() -> None:
    """The coordinator of a member of `ssp` or `bsp` is gone for good."""
    coordinators = AwayClocks(10**9)
    drained = MemberDrained("a leaves job j", seen="SIGTERM")
    ended: list[MemberDrained] = []
    clock = Clock(coordinators, Token, bound=1, ended=lambda: ended[-1] if ended else None)
    leaving = threading.Timer(0.1, ended.append, [drained])
    leaving.start()
    with pytest.raises(MemberDrained, match="SIGTERM"):
        clock.begin()
    leaving.join()


@pytest.mark.parametrize("drained_first", [False, True])
async def test_a_drain_ends_the_wait_to_report_that_the_work_is_done(drained_first: bool) -> None:
    """The process ends with an error, so that its launcher does not take the job for finished."""
    limits = Limits(heartbeat_s=0.05, collective_s=10.0, join_s=60.0)
    async with served(MemoryStore(), limits) as world:
        (a,) = await world.training("a")
        a.limits.drain_s = 0.2
        await world.coordinator.step_down()
        await world.server.stop(None)
        left = asyncio.to_thread(a.leave, completed=True, reason="all is trained")
        if drained_first:
            a.drain("SIGTERM")
            assert await asyncio.to_thread(a.wait_generation_over, 1, limits.join_s)
        leaving = asyncio.ensure_future(left)
        if not drained_first:
            a.drain("SIGTERM")
        async with asyncio.timeout(limits.join_s / 2):
            with pytest.raises(Unavailable, match=r"SIGTERM.*Run the job again"):
                await leaving


async def test_a_drain_ends_a_report_without_a_coordinator() -> None:
    """Coordinators and workers of a job get SIGTERM at once: a collective fails, and the report
    reaches no coordinator."""
    limits = Limits(heartbeat_s=0.05, collective_s=10.0, join_s=60.0)
    async with served(MemoryStore(), limits) as world:
        (a,) = await world.training("a")
        a.limits.drain_s = 0.2
        await world.coordinator.step_down()
        await world.server.stop(None)
        reported = asyncio.ensure_future(asyncio.to_thread(a.report_broken, "b is gone"))
        a.drain("SIGTERM")
        async with asyncio.timeout(limits.join_s / 2):
            with pytest.raises(MemberDrained, match="SIGTERM"):
                await reported
            begun_s = time.monotonic()
            left = asyncio.to_thread(a.leave, completed=False, reason="drained", timeout_s=60.0)
            assert not await left, "the leave was acknowledged"
            assert time.monotonic() - begun_s < unhurried(5.0), "leaving took too long"
