"""The Clocks service over real gRPC, with the client that workers use."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import pytest
from support.clusters.coordinator_world import FIELDS, Served, entered, served
from support.clusters.memory_store import MemoryStore

from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership.member_session import MemberSession
from shoal_client.progress.clocks import Clock
from shoal_proto.errors import DeadlineExceeded, Fenced, MalformedMessage, MemberDrained, NotLeader
from shoal_proto.v1 import clocks_pb2 as pb
from shoal_proto.v1.clocks_pb2_grpc import ClocksStub
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.clocks import MAX_JOBS, ClocksService
from shoal_server.core.limits import Limits
from shoal_server.core.processes import MemberProcess

DEADLINE_S = 20.0
IMPATIENT = Limits(heartbeat_s=0.1, join_s=8.0)
"""A member is lost after others have waited for it for two seconds."""


@dataclass
class Stepping:
    """A member and its clock; its calls run in a thread, as in a training process."""

    member: MemberSession
    coordinators: Coordinators
    clock: Clock

    async def step(self) -> bool:
        """Begin and finish a step; return True if it had to pull."""
        pulls = await asyncio.to_thread(self.clock.begin)
        self.clock.finished()
        return pulls


async def stepping(world: Served, name: str, *, bound: int, wait_s: float = 20.0) -> Stepping:
    """Return a member that has joined, with a clock."""
    member = world.client(name)
    await asyncio.to_thread(member.join)
    coordinators = Coordinators([world.address])
    clock = Clock(coordinators, lambda: member.token, bound=bound, wait_s=wait_s)
    return Stepping(member, coordinators, clock)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns true."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - the state of a coordinator, which sends no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def two(
    bound: int, limits: Limits | None = None
) -> AsyncIterator[tuple[Served, list[Stepping]]]:
    """Run a coordinator with two members, each of which has begun its first step."""
    async with served(MemoryStore(), limits) as world:
        members = [await stepping(world, name, bound=bound) for name in "ab"]
        for each in members:
            assert await asyncio.to_thread(each.clock.begin), "a new member pulls"
        yield world, members


async def test_a_member_that_waits_is_shown_with_the_reason() -> None:
    """`waiting_for` names the slow member and its round; both members continue together."""
    async with two(bound=1) as (world, (fast, slow)):
        fast.clock.finished()
        assert not await fast.step(), "one round ahead is within the bound"
        waits = asyncio.create_task(fast.step())
        await until(lambda: bool(world.parameters.clock_service.waiting("j")))
        (job,) = world.coordinator.view.jobs()
        shown = {detail.member.member_id: detail.member for detail in job.members}
        reason = "b in round 0: the waiting member's next round is 2, the bound 1"
        assert shown["a"].waiting_for == reason
        assert (shown["a"].clock, shown["b"].clock) == (2, 0)
        assert not waits.done()
        slow.clock.finished()
        assert await slow.step(), "it pulls, and enters the newest round"
        assert slow.clock.round == 3
        assert await waits
        assert world.parameters.clock_service.waiting("j") == {}


async def test_no_member_waits_for_one_that_left() -> None:
    """The coordinator removes its clock at once."""
    async with two(bound=0) as (_, (stays, leaves)):
        stays.clock.finished()
        waits = asyncio.create_task(stays.step())
        await asyncio.to_thread(leaves.member.leave, completed=False, reason="test")
        assert await asyncio.wait_for(waits, DEADLINE_S)
        with pytest.raises(Fenced):
            await asyncio.to_thread(leaves.clock.begin)


async def test_no_member_waits_for_one_without_samples() -> None:
    """The member rests, and continues in the round that the other has reached by then."""
    async with two(bound=0) as (_, (works, rests)):
        rests.clock.finished()
        await asyncio.to_thread(rests.clock.rest)
        works.clock.finished()
        for _ in range(5):
            await works.step()
        assert await asyncio.wait_for(rests.step(), DEADLINE_S)
        assert rests.clock.round == works.clock.round == 6
        await asyncio.to_thread(rests.clock.rest)
        assert await asyncio.wait_for(works.step(), DEADLINE_S)


async def test_a_member_that_is_stuck_is_declared_lost() -> None:
    """A member that sends heartbeats but takes no step is fenced, and the member that waited for it
    continues."""
    async with two(bound=0, limits=IMPATIENT) as (_, (waits, stuck)):
        waits.clock.finished()
        assert await asyncio.wait_for(waits.step(), DEADLINE_S)
        with pytest.raises(Fenced):
            await asyncio.to_thread(stuck.clock.begin)


async def test_a_wait_that_ends_names_the_slow_member() -> None:
    """The wait ends at the caller's own limit."""
    async with served(MemoryStore()) as world:
        fast = await stepping(world, "a", bound=0, wait_s=0.2)
        slow = await stepping(world, "b", bound=0)
        for each in (fast, slow):
            await asyncio.to_thread(each.clock.begin)
        fast.clock.finished()
        reason = "b in round 0: the waiting member's next round is 1"
        with pytest.raises(DeadlineExceeded, match=reason):
            await asyncio.to_thread(fast.clock.begin)


async def test_members_report_their_clocks_to_a_new_leader() -> None:
    """A member waits until all that trained have reported, unless its own clock allows the step."""
    store = MemoryStore()
    async with served(store) as first:
        members = [await stepping(first, name, bound=1) for name in "ab"]
        for each in members:
            await asyncio.to_thread(
                each.member.propose, FIELDS, synchronous=False, step=0, has_state=False
            )
        await asyncio.gather(*(entered(each.member, 0) for each in members))
        fast, slow = members
        for each in members:
            await asyncio.to_thread(each.clock.begin)
        fast.clock.finished()
        async with served(store) as second:
            successor = NotLeader("", details={"leader": second.address})
            for each in members:
                each.coordinators.choose_next_replica(first.address, successor)
            assert not await fast.step(), "its own clock allows the step"
            waits = asyncio.create_task(fast.step())
            await until(lambda: bool(second.parameters.clock_service.waiting("j")))
            (reason, _) = second.parameters.clock_service.waiting("j")["a"]
            assert reason == "b to report their clocks to the new leader"
            assert not waits.done()
            slow.clock.finished()
            await asyncio.wait_for(asyncio.gather(slow.step(), waits), DEADLINE_S)


async def test_a_bound_that_is_too_large_is_refused() -> None:
    """The error has the bound."""
    async with two(bound=0) as (world, (one, _)):
        request = pb.AdvanceRequest(token=one.member.token, bound=1 << 40)
        with pytest.raises(MalformedMessage, match="bound 1099511627776"):
            await asyncio.to_thread(
                Coordinators([world.address]).call,
                lambda channel: ClocksStub(channel).Advance,
                request,
                timeout_s=5.0,
            )


def permissive_service(clock: Callable[[], float] = time.monotonic) -> ClocksService:
    """Make a service that accepts every token, and must declare no member lost."""

    async def any_caller(token: Token) -> None:
        """Accept every token."""

    async def none_is_lost(job: str, who: MemberProcess, reason: str) -> None:
        raise AssertionError(f"{who} of {job} was declared lost: {reason}")

    return ClocksService(any_caller, none_is_lost, clock, stuck_after_s=DEADLINE_S)


async def test_a_call_that_waits_when_its_job_is_reset_is_refused() -> None:
    service = permissive_service()
    service.inherit("j", [MemberProcess(name, f"{name}-1") for name in "ab"])
    token = Token(job="j", member_id="a", incarnation="a-1")
    request = pb.AdvanceRequest(token=token, clock=7, bound=0, wait_s=DEADLINE_S)
    waits = asyncio.create_task(service.Advance(request, None))
    await until(lambda: bool(service.waiting("j")))
    service.forget("j")
    with pytest.raises(
        NotLeader, match="the clocks of job j were dropped; saw a job that was reset"
    ):
        await waits


async def test_two_calls_of_a_member_wait_without_waking_each_other() -> None:
    """A retry waits beside the call of a half-open connection; both are answered together."""
    readings = count()
    service = permissive_service(lambda: float(next(readings)))
    service.inherit("j", [MemberProcess(name, f"{name}-1") for name in "ab"])

    def advance(name: str, wait_s: float) -> "asyncio.Task[pb.AdvanceReply]":
        token = Token(job="j", member_id=name, incarnation=f"{name}-1")
        request = pb.AdvanceRequest(token=token, clock=7, bound=0, wait_s=wait_s)
        return asyncio.create_task(service.Advance(request, None))

    waits = [advance("a", DEADLINE_S) for _ in range(2)]
    for _ in range(100):
        await asyncio.sleep(0)
    before = next(readings)
    for _ in range(100):
        await asyncio.sleep(0)
    assert next(readings) == before + 1, "decided again, although no clock has moved"
    assert (await advance("b", 0.0)).allowed
    assert all(reply.allowed for reply in await asyncio.gather(*waits))


async def test_the_refusal_of_a_stuck_member_fails_no_other_call() -> None:
    """One stuck member was drained meanwhile; the other is declared lost all the same."""
    lost: list[str] = []

    async def anybody(token: Token) -> None:
        """Accept every token."""

    async def refuse(job: str, who: MemberProcess, reason: str) -> None:
        lost.append(who.member_id)
        if who.member_id == "b":
            raise MemberDrained("b has left job j")

    seconds = count(0.0, 1.0)
    service = ClocksService(anybody, refuse, lambda: next(seconds), stuck_after_s=0.01)
    service.inherit("j", [MemberProcess(name, f"{name}-1") for name in "abc"])
    token = Token(job="j", member_id="a", incarnation="a-1")
    request = pb.AdvanceRequest(token=token, clock=7, bound=0, wait_s=DEADLINE_S)
    assert not (await service.Advance(request, None)).allowed
    assert lost == ["b", "c"]


async def test_inherited_members_are_waited_for_however_many_jobs_there_are() -> None:
    """Clocks that members have not reported to this leader yet are not evicted for other jobs."""
    members = [MemberProcess(name, f"{name}-1") for name in "ab"]
    service = permissive_service()

    async def advances(job: str, who: MemberProcess) -> pb.AdvanceReply:
        token = Token(job=job, **who._asdict())
        return await service.Advance(pb.AdvanceRequest(token=token, clock=7, bound=0), None)

    service.inherit("old", members)
    for i in range(MAX_JOBS + 1):
        await advances(f"job-{i}", members[0])
    first = await advances("old", members[0])
    assert (first.allowed, first.slowest) == (False, 0)
    assert first.reason == "b to report their clocks to the new leader"
    assert (await advances("old", members[1])).allowed
