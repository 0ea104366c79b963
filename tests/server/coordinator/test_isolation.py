"""Faults of one job quarantine that job and no other; the term continues."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from support.clusters.coordinator_world import Served, propose, served
from support.clusters.hooked_store import HookedStore, Transaction
from support.clusters.memory_store import MemoryStore
from support.processes.served_process import awaited

from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import JobQuarantined, RefusedError
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.repair_pb2 import RepairRequest
from shoal_proto.v1.repair_pb2_grpc import RepairsStub
from shoal_proto.v1.samples_pb2 import LeaseRequest
from shoal_proto.v1.samples_pb2_grpc import SamplesStub
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.core.driver.job_driver import JobDriver
from shoal_server.core.generations.progress import JobResult
from shoal_server.core.generations.roster import JobSpec, Step
from shoal_server.core.job.job import Job
from shoal_server.core.membership.events import Effect, MemberEvent, StepReported
from shoal_server.etcd import keys
from shoal_server.etcd.api import TransactionResult, created_at


def member_of(world: Served, job: str, name: str) -> MemberSession:
    return world.client(name, job=job, desired=1, high=1)


async def trains_alone(world: Served, job: str, name: str) -> MemberSession:
    client = member_of(world, job, name)
    await asyncio.to_thread(client.join)
    await asyncio.to_thread(propose, client)
    record = await asyncio.to_thread(client.await_generation, 0, 10.0)
    await asyncio.to_thread(client.ready, record)
    return client


async def ask(world: Served, method: Callable[[Any], Any], request: Any) -> Any:
    def call() -> Any:
        coordinators = Coordinators([world.address])
        try:
            return coordinators.call(method, request, timeout_s=10.0)
        finally:
            coordinators.close()

    return await asyncio.to_thread(call)


def quarantined(world: Served) -> list[str]:
    return sorted(world.coordinator.registry.quarantined)


async def test_an_event_that_fails_quarantines_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that raises an error on an event is quarantined, because its state may be inconsistent.
    A repair reads the job from etcd again."""
    real, is_broken = Job.handle, True

    def handle(job: Job, event: MemberEvent, now_s: float) -> Sequence[Effect]:
        if is_broken and job.spec.job == "bad" and isinstance(event, StepReported):
            raise KeyError("w7")
        return real(job, event, now_s)

    monkeypatch.setattr(Job, "handle", handle)
    async with served(MemoryStore()) as world:
        (good,) = await world.training("a")
        bad = await trains_alone(world, "bad", "b")
        request = pb.SettleRequest(token=bad.token, step=1, has_state=True)
        with pytest.raises(JobQuarantined, match=r"KeyError\('w7'\)"):
            await ask(world, lambda c: MembershipStub(c).Settle, request)
        assert quarantined(world) == ["bad"]
        assert not world.coordinator.term.deposed.is_set()
        is_broken = False
        repair = RepairRequest(job="bad", apply=True)
        assert (await ask(world, lambda c: RepairsStub(c).Repair, repair)).goes_on
        assert quarantined(world) == []
        assert not good.is_broken(1) and not bad.failure


@pytest.mark.parametrize(
    ("method", "operate"),
    [
        ("stop", lambda actor: actor.stop("r")),
        ("abandon", lambda actor: actor.abandon("r")),
        ("retry", lambda actor: actor.retry("r", from_scratch=False)),
        (
            "keep_result",
            lambda actor: actor.keep_result(JobResult(step=Step(1), loss=None, num_samples=None)),
        ),
    ],
)
async def test_an_operation_that_fails_quarantines_its_job(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    operate: Callable[[JobActor], Awaitable[None]],
) -> None:
    """Like a member's event, it may leave a state that is half-changed."""

    def fail(job: Job, *arguments: object, **options: object) -> Sequence[Effect]:
        raise KeyError("w7")

    async with served(MemoryStore()) as world:
        actor = world.coordinator.registry.find_or_create(JobSpec(job="bad", max_members=1))
        monkeypatch.setattr(Job, method, fail)
        with pytest.raises(JobQuarantined, match=r"KeyError\('w7'\)"):
            await operate(actor)
        assert quarantined(world) == ["bad"]


async def test_one_heartbeat_of_a_request_fails_without_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = JobDriver.heartbeat

    def heartbeat(driver: Any, *arguments: Any) -> None:
        if driver.job.spec.job == "bad":
            raise ZeroDivisionError
        real(driver, *arguments)

    monkeypatch.setattr(JobDriver, "heartbeat", heartbeat)
    async with served(MemoryStore()) as world:
        (good,) = await world.training("a")
        client = member_of(world, "bad", "b")
        await asyncio.to_thread(client.join)
        beats = [pb.Beat(token=each.token) for each in (client, good)]
        reply = await ask(
            world, lambda c: MembershipStub(c).Heartbeat, pb.HeartbeatRequest(beats=beats)
        )
        assert reply.replies[0].error.kind == "JobQuarantined"
        assert not reply.replies[1].HasField("error")
        assert quarantined(world) == ["bad"]


class Refusing(HookedStore):
    """Store that refuses writes of one key, as etcd does above its limit."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = ""
        self.written: set[str] = set()

    async def before(self, transaction: Transaction) -> None:
        if self.refused in {each.key for each in transaction.puts}:
            raise RefusedError("etcd refused the request", seen="request is too large")

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        self.written.update(each.key for each in transaction.puts)


async def test_a_ledger_that_etcd_refuses_quarantines_its_job() -> None:
    """Regression: the write was repeated without end, four times a second, without a report."""
    store = Refusing()
    store.refused = keys.sample_ledger("bad")
    async with served(store) as world:
        for job in ("bad", "good"):
            client = await trains_alone(world, job, "a")
            request = LeaseRequest(
                token=client.token, num_samples=4, dataset_size=8, num_epochs=1, sequence=1
            )
            await ask(world, lambda c: SamplesStub(c).Lease, request)

        def is_quarantined() -> bool:
            return quarantined(world) == ["bad"]

        await asyncio.to_thread(awaited, is_quarantined, 10.0, "the job is quarantined")

        def is_written() -> bool:
            return keys.sample_ledger("good") in store.written

        await asyncio.to_thread(awaited, is_written, 10.0, "the other's ledger is written")


async def test_a_term_ends_with_the_leaders_key_and_not_with_a_refused_write() -> None:
    """A write that etcd refuses quarantines its job. The term ends with the first write that finds
    the leader's key gone."""
    store = Refusing()
    revision = await store.put(keys.LEADER, b"{}")
    conditions = [created_at(keys.LEADER, revision)]
    async with served(store, conditions=conditions) as world:
        store.refused = keys.job_state("bad")
        client = member_of(world, "bad", "a")
        with pytest.raises(JobQuarantined, match="too large"):
            await asyncio.to_thread(client.join)
        (good,) = await world.training("b")
        assert not world.coordinator.term.deposed.is_set()
        await store.delete(keys.LEADER)
        request = LeaseRequest(
            token=good.token, num_samples=4, dataset_size=8, num_epochs=1, sequence=1
        )
        await ask(world, lambda c: SamplesStub(c).Lease, request)
        async with asyncio.timeout(10.0):
            await world.coordinator.term.deposed.wait()
        assert await store.get(keys.sample_ledger("j")) is None
