"""Drains through the typed client: real gRPC, a real coordinator, members in lockstep."""

import asyncio
import contextlib
import os
import threading

import grpc.aio
import pytest
from support.clusters.coordinator_world import Served, entered, propose, served
from support.clusters.memory_store import MemoryStore
from support.processes.served_process import awaited

from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import MemberDrained, NotLeader, StateLost
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.core.limits import Limits

WITHIN_S = 60.0


class Lockstep:
    """Members that train step by step together, as collectives make them do."""

    def __init__(self, *members: MemberSession) -> None:
        self.members = members
        self._barrier = threading.Barrier(len(members), timeout=WITHIN_S)
        self.stopped_at: dict[str, int] = {}

    async def until_changed(self, step: int = 0) -> list[pb.GenerationRecord | MemberDrained]:
        """The result of each member when it stops: the next record, or its drain."""
        return await asyncio.gather(
            *(asyncio.to_thread(self._train, m, step) for m in self.members)
        )

    def _train(self, member: MemberSession, step: int) -> pb.GenerationRecord | MemberDrained:
        while True:
            try:
                record = member.begin_step(step)
            except MemberDrained as drained:
                self.stopped_at[member.token.member_id] = step
                return drained
            if record is not None:
                self.stopped_at[member.token.member_id] = step
                member.ready(record)
                return record
            self._barrier.wait()
            step += 1


def names(record: pb.GenerationRecord) -> list[str]:
    return [entry.member_id for entry in record.roster.entries]


async def test_a_drained_member_leaves_before_the_others_next_step() -> None:
    """The change is planned: members see no break, and all stop before the same step."""
    async with served(MemoryStore()) as world:
        a, b, c = await world.training("a", "b", "c")
        c.drain("spot notice")
        crew = Lockstep(a, b, c)
        to_a, to_b, to_c = await crew.until_changed()
        assert isinstance(to_a, pb.GenerationRecord)
        assert names(to_a) == ["a", "b"]
        assert to_a == to_b
        assert isinstance(to_c, MemberDrained)
        assert to_c.seen == "spot notice"
        assert len(set(crew.stopped_at.values())) == 1
        assert not any(member.is_broken(1) for member in (a, b, c))
        assert c.draining
        assert await asyncio.to_thread(c.leave, completed=False, reason="drained")
        assert a.begin_step(100) is None


@pytest.mark.parametrize("reason", ["spot notice", os.fsdecode(b"spot notice of caf\xe9")])
async def test_the_last_member_leaves_at_once_when_drained(reason: str) -> None:
    """The last member of a job stops before its next step when drained, and its state is gone with
    it: the next member gets StateLost instead of starting over. A reason may name a file, whose
    name may have any bytes."""
    async with served(MemoryStore()) as world:
        (a,) = await world.training("a")
        a.pause(reason, WITHIN_S)
        a.drain(reason)
        assert await asyncio.to_thread(a.wait_generation_over, 1, WITHIN_S)
        with pytest.raises(MemberDrained, match="spot notice"):
            a.begin_step(0)
        with pytest.raises(MemberDrained):
            a.await_generation(above=1)
        assert await asyncio.to_thread(a.leave, completed=False, reason=reason)
        b = await world.joined("b", desired=1)
        with pytest.raises(StateLost, match="its first steps, in generation 1"):
            await entered(b, 1)


async def test_a_waiting_member_leaves_at_once_when_drained() -> None:
    """A drain ends a member's wait for other members, which may never come."""
    async with served(MemoryStore()) as world:
        a = await world.joined("a", desired=2)
        waiting = asyncio.ensure_future(asyncio.to_thread(a.await_generation, 0, WITHIN_S))
        a.drain("spot notice")
        with pytest.raises(MemberDrained):
            await waiting


async def test_a_change_that_fails_after_the_boundary_releases_the_drained_member() -> None:
    """The old generation is over by then: the member reports its step like the others, and may
    leave."""
    async with served(MemoryStore()) as world:
        a, b, c = await world.training("a", "b", "c")
        c.drain("spot notice")
        leaver = asyncio.ensure_future(asyncio.to_thread(_stand, c))
        crossed = await asyncio.gather(*(asyncio.to_thread(_cross, m) for m in (a, b)))
        assert [names(record) for record in crossed] == [["a", "b"]] * 2
        await asyncio.to_thread(a.report_broken, "no route to b")
        # The step that it may begin now belongs to a generation that is over, unless it learns
        # first that it is not needed any more.
        with contextlib.suppress(MemberDrained):
            assert await leaver is None
        assert await asyncio.to_thread(c.await_break, 1, WITHIN_S)
        for member in (a, b):
            assert await asyncio.to_thread(member.await_break, 2, WITHIN_S)
        for member in (a, b, c):
            await asyncio.to_thread(member.settle, 1, has_state=True)
        with pytest.raises(MemberDrained):
            await asyncio.to_thread(c.await_generation, 1, WITHIN_S)
        assert await asyncio.to_thread(c.leave, completed=False, reason="drained")
        records = await asyncio.gather(entered(a, 2), entered(b, 2))
        assert names(records[0]) == ["a", "b"]


def _cross(member: MemberSession) -> pb.GenerationRecord:
    """Stop for the next generation before the first step, and do not bring it up."""
    member.wait_generation_over(1, WITHIN_S)
    record = member.begin_step(0)
    assert record is not None
    return record


def _stand(member: MemberSession) -> pb.GenerationRecord | None:
    member.wait_generation_over(1, WITHIN_S)
    return member.begin_step(0)


async def test_a_new_leader_gets_the_drain_request() -> None:
    """The leader that got it went away before another member could take over."""
    store = MemoryStore()
    async with served(store) as first:
        (a,) = await first.training("a")
        await asyncio.to_thread(first.client("comes", desired=1).join)
        async with grpc.aio.insecure_channel(first.address) as channel:
            asked = pb.DrainRequest(job="j", member_id="a", reason="spot notice")
            await MembershipStub(channel).Drain(asked)
        await asyncio.to_thread(awaited, lambda: a.draining, WITHIN_S, "a begins to drain")
        await first.coordinator.step_down()
        async with served(store) as second:
            b = second.client("b", desired=1)
            await asyncio.to_thread(b.join)
            a.coordinators.choose_next_replica(
                first.address, NotLeader("moved", details={"leader": second.address})
            )
            await asyncio.to_thread(propose, b)
            joining = asyncio.ensure_future(entered(b, 1))
            (to_a,) = await Lockstep(a).until_changed()
            assert isinstance(to_a, pb.GenerationRecord)
            assert names(to_a) == ["a", "b"]
            await joining
            to_a, to_b = await Lockstep(a, b).until_changed(step=1000)
            assert isinstance(to_a, MemberDrained)
            assert isinstance(to_b, pb.GenerationRecord)
            assert names(to_b) == ["b"]
            assert not b.is_broken(2)


async def test_without_a_coordinator_a_drained_member_leaves_after_a_bound() -> None:
    """Members cannot agree without a coordinator, and the host may be about to go."""
    limits = Limits(heartbeat_s=0.05, join_s=4)
    async with served(MemoryStore(), limits) as world:
        (a,) = await _training_alone(world)
        await world.coordinator.step_down()
        a.drain("spot notice")
        assert await asyncio.to_thread(a.wait_generation_over, 1, WITHIN_S)
        with pytest.raises(MemberDrained, match="spot notice"):
            a.begin_step(0)


async def _training_alone(world: Served) -> list[MemberSession]:
    client = world.client("a", desired=1)
    await asyncio.to_thread(client.join)
    await asyncio.to_thread(propose, client)
    await entered(client, 0)
    return [client]
