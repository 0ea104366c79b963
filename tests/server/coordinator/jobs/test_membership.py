"""Membership over real gRPC: what clients see when members join, leave and are lost."""

import asyncio
import threading
from typing import Any

import grpc
import grpc.aio
import pytest
from support.clusters.coordinator_world import FIELDS, entered, propose, served
from support.clusters.memory_store import MemoryStore

from shoal_client.connection.coordinators import Coordinators
from shoal_client.membership import calls
from shoal_client.membership.member import Member
from shoal_client.membership.member_events import CallEnded, CallLeader, Event
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import (
    DeadlineExceeded,
    Fenced,
    InvalidSpec,
    JobFinished,
    MalformedMessage,
    NotLeader,
    ProposalConflict,
    Unavailable,
    UnknownJob,
)
from shoal_proto.incarnation import new_incarnation
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.core.limits import Limits
from shoal_server.etcd import keys

WITHIN_S = 10.0


def broken(client: MemberSession, generation: int) -> "asyncio.Future[bool]":
    return asyncio.ensure_future(asyncio.to_thread(client.await_break, generation, WITHIN_S))


async def test_members_get_one_record_and_it_is_in_the_store() -> None:
    """Two members get the same roster with ranks, and this roster is durable."""
    store = MemoryStore()
    async with served(store) as world:
        a, b = await world.joined("a"), await world.joined("b")
        records = await asyncio.gather(entered(a, 0), entered(b, 0))
        assert records[0] == records[1]
        assert [e.member_id for e in records[0].roster.entries] == ["a", "b"]
        kept = await store.get(keys.generation("j", 1))
        assert kept is not None
        assert b'"VERDICT_COMMITTED"' in kept.value
        member = await store.get(keys.member("j", "a"))
        assert member is not None
        assert a.token.incarnation.encode() in member.value


async def test_a_member_is_lost_if_its_stream_and_a_collective_break() -> None:
    """The survivor is alone in the next generation, and the lost member's key is deleted."""
    store = MemoryStore()
    async with served(store) as world:
        a, b = await world.training("a", "b")
        await asyncio.to_thread(b.close)  # the connection drops without notice, as in a kill
        await asyncio.to_thread(a.report_broken, "connection reset by peer")
        assert await broken(a, 1)
        await asyncio.to_thread(a.settle, 5, has_state=True)
        record = await entered(a, 1)
        assert [e.member_id for e in record.roster.entries] == ["a"]
        assert record.roster.step == 5
        assert await store.get(keys.member("j", "b")) is None


async def test_an_exit_that_a_launcher_reports_breaks_the_generation() -> None:
    """The member's stream and heartbeats need not end first."""
    async with served(MemoryStore()) as world:
        a, _ = await world.training("a", "b")
        async with grpc.aio.insecure_channel(world.address) as channel:
            report = pb.ReportExitRequest(job="j", member_id="b", pid=1, host="h", exit_code=-9)
            await MembershipStub(channel).ReportExit(report)
        assert await broken(a, 1)


async def test_an_exit_of_another_process_of_the_member_changes_nothing() -> None:
    """A report of the exit of a replaced process does not remove the process that replaced it."""
    async with served(MemoryStore()) as world:
        a, _ = await world.training("a", "b")
        async with grpc.aio.insecure_channel(world.address) as channel:
            report = pb.ReportExitRequest(job="j", member_id="b", pid=2, host="h", exit_code=1)
            ack = await MembershipStub(channel).ReportExit(report)
        assert (ack.generation, ack.phase) == (1, "running")
        assert not a.is_broken(1)


async def test_a_silent_member_is_lost_after_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its stream open, and nobody sends heartbeats for it."""
    make_call, silent = calls.make_call, list[str]()

    def unless_silent(coordinators: Coordinators, call: CallLeader, *more: Any) -> Event:
        request = call.request
        is_beat = isinstance(request, pb.HeartbeatRequest)
        if is_beat and {beat.token.member_id for beat in request.beats} & set(silent):
            return CallEnded(call=call)
        return make_call(coordinators, call, *more)

    monkeypatch.setattr(calls, "make_call", unless_silent)
    async with served(MemoryStore(), Limits(heartbeat_s=0.1, join_s=60)) as world:
        a, _ = await world.training("a", "b")
        silent.append("b")
        assert await broken(a, 1)
        assert "no heartbeat" in a.waiting_for


async def stopped_together(members: list[MemberSession], step: int) -> list[pb.GenerationRecord]:
    """Train in lockstep until a new generation, and return each member's record of it."""
    lockstep = threading.Barrier(len(members), timeout=WITHIN_S)

    def train(member: MemberSession) -> pb.GenerationRecord:
        at = step
        while (record := member.begin_step(at)) is None:
            lockstep.wait()
            at += 1
        stopped_at.append(at)
        return record

    stopped_at: list[int] = []
    records = await asyncio.gather(*(asyncio.to_thread(train, m) for m in members))
    assert len(set(stopped_at)) == 1
    return list(records)


async def test_a_joiner_enters_at_the_step_before_which_all_members_stop() -> None:
    """The old members go on to one agreed step, then all enter the next generation."""
    async with served(MemoryStore()) as world:
        a, b = await world.training("a", "b")
        c = await world.joined("c", desired=2)
        joining = asyncio.ensure_future(asyncio.to_thread(c.await_generation, 0, WITHIN_S))
        records = await stopped_together([a, b], 0)
        assert [*records, await joining] == [records[0]] * 3
        assert [e.member_id for e in records[0].roster.entries] == ["a", "b", "c"]
        await asyncio.gather(*(asyncio.to_thread(m.ready, records[0]) for m in (a, b, c)))
        assert a.begin_step(100) is None


async def test_a_member_with_another_model_is_refused_and_the_others_train_on() -> None:
    """The error names the field, and which members have which value."""
    async with served(MemoryStore()) as world:
        a, _ = await world.training("a", "b")
        odd = world.client("odd")
        await asyncio.to_thread(odd.join)
        with pytest.raises(ProposalConflict, match=r"schema: 's1' in a, b but 's2' in odd"):
            await asyncio.to_thread(propose, odd, 0, {**FIELDS, "schema": "s2"})
        assert not a.is_broken(1)
        assert a.begin_step(0) is None


async def test_a_replaced_process_is_fenced() -> None:
    """The old process's calls are refused from the moment its successor joins."""
    async with served(MemoryStore()) as world:
        # Another member holds the state, so that the job is not lost.
        old, _ = await world.training("a", "b")
        await world.joined("a", desired=2)
        with pytest.raises(Fenced):
            await asyncio.to_thread(old.settle, 1, has_state=True)


async def test_a_finished_job_is_not_started_again() -> None:
    """The name of a finished job cannot be used again, and the error says so."""
    async with served(MemoryStore()) as world:
        a = await world.joined("a", desired=1)
        await entered(a, 0)
        await asyncio.to_thread(lambda: a.leave(completed=True, reason="done"))
        late = world.client("b")
        with pytest.raises(JobFinished, match="or give another job name"):
            await asyncio.to_thread(late.join)


async def test_a_minimum_of_members_above_the_maximum_is_refused() -> None:
    """The error has both numbers."""
    async with served(MemoryStore()) as world:
        client = world.client("a", low=4, high=2)
        with pytest.raises(InvalidSpec, match="min_members is 4 and max_members 2"):
            await asyncio.to_thread(client.join)


async def test_the_error_names_a_coordinator_that_cannot_be_reached() -> None:
    """The error has the coordinator's address."""
    spec = pb.JobSpec(job="j", min_members=1, max_members=1, desired_members=1)
    member = Member(
        coordinators=["127.0.0.1:1"],
        spec=spec,
        member_id="a",
        incarnation=new_incarnation(),
        info=pb.MemberInfo(),
    )
    client = MemberSession(member)
    with pytest.raises((DeadlineExceeded, Unavailable), match=r"127\.0\.0\.1:1"):
        await asyncio.to_thread(client.join, 0.5)


async def test_malformed_bytes_are_refused_with_the_expected_type() -> None:
    """The error is MalformedMessage, and the coordinator serves on."""
    async with served(MemoryStore()) as world:
        async with grpc.aio.insecure_channel(world.address) as channel:
            call = channel.unary_unary("/shoal.v1.Membership/Propose")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(b"\xff\xff\xff\xff")
        error = from_rpc_error(failed.value, world.address)
        assert isinstance(error, MalformedMessage)
        assert error.expected == "shoal.v1.ProposeRequest"
        await world.training("a")


async def test_the_error_for_an_unknown_job_lists_the_jobs_that_exist() -> None:
    """The error is UnknownJob."""
    async with served(MemoryStore()) as world:
        await world.training("a")
        async with grpc.aio.insecure_channel(world.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await MembershipStub(channel).GetJob(pb.GetJobRequest(job="other"))
        error = from_rpc_error(failed.value, world.address)
        assert isinstance(error, UnknownJob)
        assert error.expected == "one of j"


async def test_a_new_leader_takes_over_a_running_job() -> None:
    """Members find the new leader and report their step, and the same generation runs on."""
    store = MemoryStore()
    async with served(store) as first:
        a, b = await first.training("a", "b")
        async with served(store) as second:
            moved = NotLeader("moved", details={"leader": second.address})
            await first.coordinator.step_down()
            for member in (a, b):
                member.coordinators.choose_next_replica(first.address, moved)
            await second.joined("c")
            record, _ = await stopped_together([a, b], 0)
            # The change is planned: the new leader knows that generation 1 still runs.
            assert record.roster.planned
            assert record.roster.generation == 2
            assert not a.is_broken(1)


async def test_a_job_is_not_kept_if_its_only_member_was_refused() -> None:
    """The member is refused for its device, or because it names a generation."""
    async with served(MemoryStore()) as world:
        registry = world.coordinator.registry
        async with grpc.aio.insecure_channel(world.address) as channel:
            for generation, device, refused in ((0, "cuda", InvalidSpec), (3, "cpu", Fenced)):
                token = Token(job="typo", member_id="a", incarnation=new_incarnation())
                token.generation = generation
                spec = pb.JobSpec(job="typo", min_members=1, max_members=2, desired_members=1)
                info = pb.MemberInfo(host="h", pid=1, address="127.0.0.1", device=device)
                request = pb.AttendRequest(token=token, spec=spec, info=info)
                request.protocol = OWN_PROTOCOLS.newest
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await MembershipStub(channel).Attend(request).read()
                assert isinstance(from_rpc_error(caught.value, world.address), refused), (
                    caught.value
                )
        assert [actor.job.spec.job for actor in registry.actors()] == []
        await world.training("a")
        assert [actor.job.spec.job for actor in registry.actors()] == ["j"]
