"""Jobs that start over: what is deleted, what stays, and which processes are refused then."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import grpc.aio
import pytest
from support.clusters.coordinator_world import Served, served
from support.clusters.hooked_store import HookedStore, Transaction, UnreliableStore
from support.clusters.memory_store import MemoryStore
from support.processes.served_process import awaited

from shoal_client.commands.jobs import check_not_finished, reset_job
from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership import calls as membership_calls
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import (
    Fenced,
    InvalidSpec,
    JobFinished,
    JobInUse,
    JobQuarantined,
    ShoalError,
    StateLost,
    Unavailable,
)
from shoal_proto.health import CourseFigures
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1 import weights_pb2
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.repair_pb2 import RepairRequest
from shoal_proto.v1.repair_pb2_grpc import RepairsStub
from shoal_proto.v1.samples_pb2 import LeaseRequest
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub
from shoal_server.coordinator.job_reset import REPEATED_WITHIN_S
from shoal_server.coordinator.persistence.earlier_runs import from_json
from shoal_server.core.limits import Limits
from shoal_server.core.membership.phases import Phase
from shoal_server.core.processes import MemberProcess
from shoal_server.core.publications.records import Publisher, SeriesHead
from shoal_server.etcd import keys
from shoal_server.etcd.records.series import encode_head
from shoal_server.status.views import HealthView


async def finished_job(world: Served) -> Sequence[MemberSession]:
    """Train two members in generation 1, and complete the job."""
    members = await world.training("a", "b")
    for member in members:
        await asyncio.to_thread(member.leave, completed=True, reason="done")
    return members


async def names(store: MemoryStore) -> set[str]:
    """Return the keys of jobs in etcd."""
    items = (await store.range(keys.ROOT)).items
    return {item.key.removeprefix(keys.ROOT) for item in items if item.key != keys.SNAPSHOT_ROOTS}


async def beat(world: Served, token: Token) -> ShoalError | None:
    """Send a heartbeat with the token, and return the error of the answer."""
    client = world.client("beater")
    request = pb.HeartbeatRequest(beats=[pb.Beat(token=token)])
    reply = await asyncio.to_thread(
        client.coordinators.call, membership_calls.heartbeat, request, timeout_s=10.0
    )
    (answer,) = reply.replies
    return from_detail(answer.error) if answer.HasField("error") else None


async def test_a_finished_job_starts_over() -> None:
    """The record of earlier runs is kept, with the last generation's number; all other keys go."""
    store = MemoryStore()
    async with served(store) as world:
        await finished_job(world)
        with pytest.raises(JobFinished, match="run it again with --fresh, or give another --job"):
            await asyncio.to_thread(check_not_finished, [world.address], "j")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == {"resets/j"}
        await asyncio.to_thread(check_not_finished, [world.address], "j")
        again = await world.training("a", "b")
        assert {member.token.generation for member in again} == {2}
        assert await names(store) == {
            *("resets/j", "jobs/j/state", "jobs/j/generations/000000000002"),
            *("members/j/a", "members/j/b"),
        }


@pytest.mark.parametrize("garbage", ["abc", "9" * 5000])
async def test_a_job_starts_over_with_garbage_among_its_generations(garbage: str) -> None:
    """A reset is the last resort. It finds the newest generation by the keys that have a number."""
    store = MemoryStore()
    async with served(store) as world:
        await finished_job(world)
        await store.put(keys.generations("j") + garbage, b"{}")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == {"resets/j"}
        again = await world.training("a", "b")
        assert {member.token.generation for member in again} == {2}


@pytest.mark.parametrize("new_leader", [False, True])
async def test_a_job_whose_state_is_lost_starts_over(new_leader: bool) -> None:
    """A reset alone does that: joins are refused, under this leader and the next."""
    async with served(MemoryStore()) as world:
        for member in await world.training("a", "b"):
            await asyncio.to_thread(member.leave, completed=False, reason="killed")
        late = await world.joined("c", desired=1)
        with pytest.raises(StateLost, match="--fresh"):
            await asyncio.to_thread(late.await_generation, 0, 10.0)
        if new_leader:
            await world.coordinator.step_down()
            await world.coordinator.lead(())
        with pytest.raises(StateLost, match="Run it again with --fresh"):
            await asyncio.to_thread(check_not_finished, [world.address], "j")
        with pytest.raises(StateLost, match="in generation 1"):
            await world.joined("d", desired=1)
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        again = await world.training("a", "b")
        assert {member.token.generation for member in again} == {3}


class HaltingStore(HookedStore):
    """A store that makes so many writes of a job's loss, and never answers the next."""

    def __init__(self, num_writes: int) -> None:
        super().__init__()
        self._left = num_writes
        self._is_lost = False
        self.has_halted = asyncio.Event()

    async def before(self, transaction: Transaction) -> None:
        state = keys.job_state("j")
        puts = transaction.puts
        self._is_lost |= any(each.key == state and b'"lost": "' in each.value for each in puts)
        if not self._is_lost or self.has_halted.is_set():
            return
        if not self._left:
            self.has_halted.set()
            await asyncio.Event().wait()
        self._left -= 1


@pytest.mark.parametrize("num_writes", [1, 2])
async def test_a_job_starts_over_whose_leader_ended_while_it_wrote_the_loss(
    num_writes: int,
) -> None:
    """The members that the leader had yet to expel do not count as live ones."""
    store = HaltingStore(num_writes)
    async with served(store) as world:
        for member in await world.training("a", "b"):
            await asyncio.to_thread(member.leave, completed=False, reason="killed")
        await world.joined("c", desired=1)
        async with asyncio.timeout(20):
            await store.has_halted.wait()
        await world.coordinator.step_down()
        assert "members/j/c" in await names(store)
        await world.coordinator.lead(())
        with pytest.raises(StateLost):
            await asyncio.to_thread(check_not_finished, [world.address], "j")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == {"resets/j"}


async def test_the_next_run_has_no_steps_of_the_last() -> None:
    """Steps and loss are gone; the events are kept."""
    async with served(MemoryStore()) as world:
        await finished_job(world)
        board = world.coordinator.board
        health = HealthView(public_id="p", received_unix_s=1.0, step=60, loss=1.5)
        board.report("j", "a", health)
        assert board.highest_step("j") == board.total_steps("j") == 60
        num_events = len(board.events("j"))
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        assert board.highest_step("j") == board.total_steps("j") == 0
        assert board.last_loss("j") is None
        assert board.health("j", "a", "p") is None
        assert len(board.events("j")) >= num_events > 0


async def test_a_refused_retry_leaves_the_reports_of_a_running_job() -> None:
    async with served(MemoryStore()) as world:
        await world.training("a")
        board, registry = world.coordinator.board, world.coordinator.registry
        board.report("j", "a", HealthView(public_id="p", received_unix_s=1.0, step=60, loss=1.5))
        with pytest.raises(InvalidSpec):
            await registry.retry("j", from_scratch=True)
        assert board.highest_step("j") == 60


@pytest.mark.parametrize(
    ("from_scratch", "is_stopped"), [(False, True), (True, True), (True, False)]
)
async def test_a_job_that_is_retried_from_scratch_has_no_steps_of_before(
    from_scratch: bool, is_stopped: bool
) -> None:
    """The steps, losses, logged values and charts of a job that goes on are kept. From scratch, an
    interrupted job can be retried too."""
    store = MemoryStore()
    async with served(store) as world:
        (member,) = await world.training("a")
        await asyncio.to_thread(member.leave, completed=False, reason="killed")
        board, registry = world.coordinator.board, world.coordinator.registry
        course = CourseFigures(logged={"accuracy": (60, 0.9)})
        health = HealthView(public_id="p", received_unix_s=1.0, step=60, loss=1.5, course=course)
        board.report("j", "a", health)
        if is_stopped:
            await registry.find("j").stop("enough")
        await store.put(keys.history("j"), b"charts")
        await registry.retry("j", from_scratch=from_scratch)
        assert (await store.get(keys.history("j")) is None) == from_scratch
        again = CourseFigures(logged={"accuracy": (3, 0.1)})
        later = HealthView(public_id="q", received_unix_s=2.0, step=3, loss=2.5, course=again)
        board.report("j", "a", later)
        assert board.highest_step("j") == (3 if from_scratch else 60)
        newest = (3, 0.1) if from_scratch else (60, 0.9)
        assert board.logged("j").newest_values() == {"accuracy": newest}


@pytest.mark.parametrize("key", [keys.assignments("j") + "s0", keys.sample_ledger("j")])
async def test_a_job_with_parameters_or_samples_is_not_retried_from_scratch(key: str) -> None:
    """Its members would continue from them. Its charts are kept."""
    store = MemoryStore()
    async with served(store) as world:
        (member,) = await world.training("a")
        await asyncio.to_thread(member.leave, completed=False, reason="killed")
        registry = world.coordinator.registry
        await registry.find("j").stop("enough")
        await store.put(keys.history("j"), b"charts")
        await store.put(key, b"{}")
        with pytest.raises(InvalidSpec, match="cannot begin at step 0"):
            await registry.retry("j", from_scratch=True)
        assert await store.get(keys.history("j")) is not None
        assert registry.find("j").job.phase is Phase.STOPPED
        await registry.retry("j", from_scratch=False)


async def test_a_finished_job_is_refused_from_scratch_as_finished() -> None:
    """The advice for a job with samples, to retry without `--from-scratch`, would not help."""
    store = MemoryStore()
    async with served(store) as world:
        await finished_job(world)
        await store.put(keys.sample_ledger("j"), b"{}")
        with pytest.raises(JobFinished):
            await world.coordinator.registry.retry("j", from_scratch=True)


async def test_a_reset_of_an_unknown_job_does_nothing() -> None:
    """The call returns False, and writes nothing."""
    store = MemoryStore()
    async with served(store) as world:
        await asyncio.to_thread(check_not_finished, [world.address], "j")
        assert not await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == set()


async def test_a_repeated_reset_has_the_answer_of_the_first() -> None:
    """A client repeats its call at the next leader, since the first answer may have been lost. A
    reset of long ago is none that it repeats."""
    store = MemoryStore()
    async with served(store) as world:
        await finished_job(world)
        assert await asyncio.to_thread(reset_job, [world.address], "j")
    async with served(store) as world:
        assert await asyncio.to_thread(reset_job, [world.address], "j")
    runs = (await store.range(keys.RESETS)).items
    earlier = replace(from_json("j", runs[0].value), ended_unix_s=time.time() - REPEATED_WITHIN_S)
    await store.put(keys.reset("j"), earlier.to_json())
    async with served(store) as world:
        assert not await asyncio.to_thread(reset_job, [world.address], "j")


async def test_a_job_with_members_is_not_reset() -> None:
    """The refusal names the members and what to do; they train on."""
    async with served(MemoryStore()) as world:
        a, b = await world.training("a", "b")
        with pytest.raises(JobInUse, match="job j has 2 live members; saw a, b") as raised:
            await asyncio.to_thread(reset_job, [world.address], "j")
        assert "To join them, use `shoal run` without --fresh." in str(raised.value)
        assert await beat(world, a.token) is None
        assert not b.is_broken(1)


async def test_a_quarantined_job_with_members_is_repaired_before_its_reset() -> None:
    """The coordinator cannot tell if the members, which have ended, still run. Once the job goes
    on, it finds that out."""
    store, limits = MemoryStore(), Limits(heartbeat_s=0.05)
    async with served(store, limits) as world:
        for member in await world.training("a", "b"):
            await asyncio.to_thread(member.close)
        newest = await store.get(keys.generation("j", 1))
    assert newest is not None
    await store.put(newest.key, b'{"format": 2}')
    async with served(store, limits) as world:
        with pytest.raises(JobInUse, match="is quarantined, and its members may") as raised:
            await asyncio.to_thread(reset_job, [world.address], "j")
        assert raised.value.seen == "a, b"
        assert "shoal repair j --apply" in raised.value.fix
        await store.put(newest.key, newest.value)
        actor = await world.coordinator.registry.resume_quarantined("j")
        assert actor is not None
        await asyncio.to_thread(awaited, lambda: not actor.job.members, 20.0, "they are lost")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == {"resets/j"}


async def test_a_removal_replaces_an_unreadable_record_of_earlier_runs() -> None:
    """The name is free then, for the next leader too."""
    store = MemoryStore()
    await store.put(keys.reset("j"), b"{garbage")
    async with served(store) as world:
        with pytest.raises(JobQuarantined):
            await asyncio.to_thread(check_not_finished, [world.address], "j")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
    async with served(store) as world:
        await world.training("a")


def repair_job(addresses: Sequence[str], job: str) -> bool:
    with closing(Coordinators(addresses)) as coordinators:
        request = RepairRequest(job=job, apply=True)
        reply = coordinators.call(lambda c: RepairsStub(c).Repair, request, timeout_s=10.0)
    return reply.goes_on


@pytest.mark.parametrize("free_name", [reset_job, repair_job])
async def test_the_run_after_an_unreadable_record_of_earlier_runs_publishes(
    free_name: Callable[[Sequence[str], str], bool],
) -> None:
    """An earlier run has published in generation 9. The next one continues the numbers, since a
    series refuses an earlier generation."""
    store, series = MemoryStore(), "j/policy"
    await store.put(keys.reset("j"), b"{garbage")
    head = SeriesHead(number=3, epoch=2, publisher=Publisher(generation=9))
    await store.put(keys.series_head(series), encode_head(head))
    async with served(store) as world:
        assert await asyncio.to_thread(free_name, [world.address], "j")
    async with served(store) as world:
        (member,) = await world.training("a")
        assert member.token.generation == 10
        sender = weights_pb2.Publisher(token=member.token)
        request = weights_pb2.BeginPublicationRequest(series=series, publisher=sender, world=1)
        async with grpc.aio.insecure_channel(world.address) as channel:
            begun = await WeightSeriesStub(channel).Begin(request)
        assert (begun.epoch, begun.head) == (3, 3)


@pytest.mark.parametrize("new_leader", [False, True])
async def test_a_process_of_an_earlier_run_is_refused_in_the_next(new_leader: bool) -> None:
    """A process of an earlier run is refused whether it had trained or not, by the same leader and
    by another."""
    store = MemoryStore()
    async with served(store) as world:
        trained, other = await world.training("a", "b")
        waited = await world.joined("c")
        for member in (trained, other, waited):
            who = MemberProcess(member.token.member_id, member.token.incarnation)
            await world.coordinator.registry.declare_lost("j", who, "a test says so")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        stale = [trained.token, waited.token]
        if not new_leader:
            await check_refused(world, stale)
    if new_leader:
        async with served(store) as world:
            await check_refused(world, stale)


async def check_refused(world: Served, stale: Sequence[Token]) -> None:
    fresh = await world.training("a", "b")
    for token in stale:
        assert isinstance(await beat(world, token), JobFinished)
        # As the process of the earlier run, which was halted meanwhile.
        process = world.member(token.member_id)
        request = pb.AttendRequest(token=token, spec=process.spec, info=process.info)
        request.protocol = OWN_PROTOCOLS.newest
        async with grpc.aio.insecure_channel(world.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await MembershipStub(channel).Attend(request).read()
        error = from_rpc_error(refused.value, world.address)
        assert isinstance(error, JobFinished)
        assert "that this process belongs to is over" in str(error)
    assert not any(member.is_broken(member.token.generation) for member in fresh)


def resets(transaction: Transaction) -> bool:
    return any(put.key.startswith(keys.RESETS) for put in transaction.puts)


async def test_a_reset_that_fails_leaves_the_job_as_it_was() -> None:
    """etcd is unavailable at first. The next reset, whose answer is lost, removes the job."""
    store = UnreliableStore(resets, once=True)
    async with served(store) as world:
        await finished_job(world)
        before = await names(store)
        store.fails = "before"
        with pytest.raises(Unavailable):
            await world.coordinator.resetting.reset("j")
        assert await names(store) == before
        with pytest.raises(JobFinished):
            await asyncio.to_thread(check_not_finished, [world.address], "j")
        store.fails = "after"
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == {"resets/j"}


async def test_the_next_run_leases_all_samples_again() -> None:
    """A write of the last run's ledger may be pending when the job is reset."""
    store = MemoryStore()
    async with served(store) as world:
        (a,) = await world.training("a")
        samples = world.parameters.sample_service

        async def train_on_all(member: MemberSession) -> int:
            request = LeaseRequest(token=member.token, dataset_size=8, num_epochs=1, sequence=1)
            request.num_samples = 8
            leased = (await samples.Lease(request, None)).range  # type: ignore[arg-type]
            request.sequence = 2
            request.completed.append(leased)
            assert (await samples.Lease(request, None)).exhausted  # type: ignore[arg-type]
            return int(leased.stop - leased.start)

        assert await train_on_all(a) == 8
        await asyncio.to_thread(a.leave, completed=False, reason="some error")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        await samples.write_all()
        assert await names(store) == {"resets/j"}
        (again,) = await world.training("a")
        assert await train_on_all(again) == 8


async def test_a_member_lost_in_the_current_run_is_fenced() -> None:
    """A member that was lost in the current run gets Fenced; JobFinished is for processes of
    earlier runs."""
    async with served(MemoryStore()) as world:
        await finished_job(world)
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        a, _ = await world.training("a", "b")
        who = MemberProcess(a.token.member_id, a.token.incarnation)
        await world.coordinator.registry.declare_lost("j", who, "a test says so")
        assert isinstance(await beat(world, a.token), Fenced)
