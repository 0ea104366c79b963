"""Outcomes sent to members: a roster is not sent twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
from support.clusters.coordinator_world import FIELDS, Served, entered, served
from support.clusters.memory_store import MemoryStore

from shoal_proto.incarnation import new_incarnation
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.rosters import roster_digest
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.coordinator.persistence.codec import record_to_pb
from shoal_server.coordinator.persistence.stored_generations import stored_record
from shoal_server.etcd import keys

WITHIN_S = 30.0


@dataclass(kw_only=True)
class Raw:
    """A member that calls the stub itself, and so reads each notice as it was sent."""

    stub: MembershipStub
    name: str = "a"
    desired: int = 1
    token: Token = field(init=False)

    def __post_init__(self) -> None:
        self.token = Token(job="j", member_id=self.name, incarnation=new_incarnation())

    @asynccontextmanager
    async def attending(self) -> AsyncIterator["AsyncIterator[pb.Notice]"]:
        spec = pb.JobSpec(job="j", min_members=1, max_members=8, desired_members=self.desired)
        request = pb.AttendRequest(
            protocol=OWN_PROTOCOLS.newest,
            token=self.token,
            spec=spec,
            info=pb.MemberInfo(host="h", address="127.0.0.1"),
        )
        call = self.stub.Attend(request)
        try:
            yield call.__aiter__()
        finally:
            call.cancel()

    async def propose(self) -> None:
        proposal = pb.Proposal(fields=FIELDS, synchronous=True)
        await self.stub.Propose(pb.ProposeRequest(token=self.token, proposal=proposal))

    async def accept(self, prepare: pb.Prepare) -> None:
        answer = pb.AnswerRequest(
            token=self.token,
            generation=prepare.roster.generation,
            digest=roster_digest(prepare.roster),
        )
        await self.stub.Answer(answer)


async def until(notices: AsyncIterator[pb.Notice], kind: str) -> pb.Notice:
    async with asyncio.timeout(WITHIN_S):
        async for notice in notices:
            if notice.WhichOneof("kind") == kind:
                return notice
    raise AssertionError(f"the stream ended without {kind}")


@asynccontextmanager
async def stub_of(world: Served) -> AsyncIterator[MembershipStub]:
    async with grpc.aio.insecure_channel(world.address) as channel:
        yield MembershipStub(channel)


async def test_a_member_is_not_sent_a_roster_twice() -> None:
    """The outcome has only the roster's generation and digest."""
    async with served(MemoryStore()) as world, stub_of(world) as stub:
        member = Raw(stub=stub)
        async with member.attending() as notices:
            await until(notices, "admitted")
            await member.propose()
            prepare = (await until(notices, "prepare")).prepare
            await member.accept(prepare)
            outcome = (await until(notices, "outcome")).outcome
            assert outcome.roster.generation == 1
            assert not outcome.roster.entries
            assert outcome.digest == roster_digest(prepare.roster)


async def test_a_new_stream_gets_the_whole_record() -> None:
    """A roster sent on an earlier stream may not have arrived."""
    async with served(MemoryStore()) as world, stub_of(world) as stub:
        member = Raw(stub=stub)
        async with member.attending() as notices:
            await until(notices, "admitted")
            await member.propose()
            prepare = (await until(notices, "prepare")).prepare
            await member.accept(prepare)
            await until(notices, "outcome")
        async with member.attending() as notices:
            outcome = (await until(notices, "outcome")).outcome
            assert outcome.roster == prepare.roster


async def test_the_typed_client_returns_the_whole_record() -> None:
    """The client adds the roster that it kept to the outcome."""
    store = MemoryStore()
    async with served(store) as world:
        a, b = await world.joined("a"), await world.joined("b")
        records = await asyncio.gather(entered(a, 0), entered(b, 0))
        stored = await store.get(keys.generation("j", 1))
    assert stored is not None
    whole = record_to_pb(stored_record("j", 1, stored.value))
    assert list(records) == [whole, whole]
