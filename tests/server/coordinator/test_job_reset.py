"""Jobs that begin anew: what is deleted, what stays, and who is refused in the next run."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.clusters.coordinator_world import Served, served

from shoal_client.commands.jobs import check_not_finished, reset_job
from shoal_client.membership import calls as membership_calls
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import Fenced, JobFinished, JobInUse, ShoalError, StateLost, Unavailable
from shoal_proto.status import from_detail
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.samples_pb2 import LeaseRequest
from shoal_server.core.processes import MemberProcess
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, Operation, Put, TransactionResult
from shoal_server.etcd.memory import MemoryStore
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


async def test_a_finished_job_begins_anew() -> None:
    """The number of the last generation is kept for the next run; all other keys go."""
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
async def test_a_job_begins_anew_whatever_lies_among_its_generations(garbage: str) -> None:
    """Removal of all keys is the last resort, and finds the newest generation by its key."""
    store = MemoryStore()
    async with served(store) as world:
        await finished_job(world)
        await store.put(keys.generations("j") + garbage, b"{}")
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == {"resets/j"}
        again = await world.training("a", "b")
        assert {member.token.generation for member in again} == {2}


@pytest.mark.parametrize("new_leader", [False, True])
async def test_a_job_whose_state_is_lost_begins_anew(new_leader: bool) -> None:
    """The job cannot begin anew by a join, nor by a change of leaders."""
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


async def test_the_next_run_has_no_steps_of_the_last() -> None:
    """Steps and loss are gone; the events can still be read."""
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


async def test_a_job_that_never_was_is_no_error() -> None:
    """The reset writes nothing."""
    store = MemoryStore()
    async with served(store) as world:
        await asyncio.to_thread(check_not_finished, [world.address], "j")
        assert not await asyncio.to_thread(reset_job, [world.address], "j")
        assert await names(store) == set()


async def test_nothing_is_taken_away_under_members() -> None:
    """The refusal names the members and says what to do; they train on."""
    async with served(MemoryStore()) as world:
        a, b = await world.training("a", "b")
        with pytest.raises(JobInUse, match="job j has 2 live members; saw a, b") as raised:
            await asyncio.to_thread(reset_job, [world.address], "j")
        assert "To join them, use `shoal run` without --fresh." in str(raised.value)
        assert await beat(world, a.token) is None
        assert not b.is_broken(1)


@pytest.mark.parametrize("new_leader", [False, True])
async def test_a_process_of_an_earlier_run_gets_no_part_in_the_next(new_leader: bool) -> None:
    """The process may have trained or not, and the leader may be another: its run is over, which
    does not mean that it may join again."""
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
        client = world.client(token.member_id)
        # The process of the earlier run, which was halted in the meantime.
        client._core.identity = replace(client._core.identity, incarnation=token.incarnation)
        client._core.track.generation = token.generation
        with pytest.raises(JobFinished, match="that this process belongs to is over"):
            await asyncio.to_thread(client.join)
    assert not any(member.is_broken(member.token.generation) for member in fresh)


class Unreliable(MemoryStore):
    """Store that fails the transaction which removes a job, before or after it took effect."""

    fails = ""

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        resets = any(isinstance(o, Put) and o.key.startswith(keys.RESETS) for o in then)
        if resets and self.fails == "before":
            raise Unavailable("etcd is away")
        result = await super().transact(compares, then, otherwise)
        if resets and self.fails == "after":
            self.fails = ""
            raise Unavailable("the answer was lost", details={"outcome": "unknown"})
        return result


async def test_a_reset_that_fails_leaves_the_job_as_it_was() -> None:
    """etcd is unavailable: the finished job stays, and the next try removes it."""
    store = Unreliable()
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


async def test_the_next_run_goes_over_all_samples() -> None:
    """The ledger of the last run may still wait to be written when the job is reset."""
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
        await samples._write_all()
        assert await names(store) == {"resets/j"}
        (again,) = await world.training("a")
        assert await train_on_all(again) == 8


async def test_a_member_that_was_lost_in_the_run_of_now_is_fenced_as_ever() -> None:
    """The answer that a run is over is for processes of earlier runs."""
    async with served(MemoryStore()) as world:
        await finished_job(world)
        assert await asyncio.to_thread(reset_job, [world.address], "j")
        a, _ = await world.training("a", "b")
        who = MemberProcess(a.token.member_id, a.token.incarnation)
        await world.coordinator.registry.declare_lost("j", who, "a test says so")
        assert isinstance(await beat(world, a.token), Fenced)
