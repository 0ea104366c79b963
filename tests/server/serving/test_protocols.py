"""Clients of other protocol versions are refused at their first call, before it has any effect."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import ProtocolMismatch
from shoal_proto.protocol import OWN_PROTOCOLS, ProtocolRange, user_agent
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1 import rendezvous_pb2, shards_pb2
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub
from shoal_proto.v1.shards_pb2_grpc import ShardsStub

NEWEST = OWN_PROTOCOLS.newest
OLDER = ProtocolRange(NEWEST - 2, NEWEST - 1)
LATER = ProtocolRange(NEWEST + 1, NEWEST + 2)
NEXT_RELEASE = ProtocolRange(NEWEST, NEWEST + 1)
TOKEN = Token(job="j", member_id="a", incarnation="1")


def attend(spoken: ProtocolRange, oldest: int | None = None) -> pb.AttendRequest:
    return pb.AttendRequest(
        protocol=spoken.newest,
        oldest_protocol=spoken.oldest if oldest is None else oldest,
        token=TOKEN,
        spec=pb.JobSpec(job="j", min_members=1, max_members=2, desired_members=1),
        info=pb.MemberInfo(host="h", pid=1, address="127.0.0.1"),
    )


async def first_notice(channel: grpc.aio.Channel, spoken: ProtocolRange) -> pb.Notice:
    call = MembershipStub(channel).Attend(attend(spoken))
    notice: pb.Notice = await call.read()
    call.cancel()
    return notice


CALLS: dict[str, Callable[[grpc.aio.Channel], Awaitable[Any]]] = {
    "a stream": lambda channel: first_notice(channel, OWN_PROTOCOLS),
    "membership": lambda channel: MembershipStub(channel).Settle(pb.SettleRequest(token=TOKEN)),
    "rendezvous": lambda channel: RendezvousStub(channel).Add(
        rendezvous_pb2.StoreAddRequest(token=TOKEN, key="k", amount=1)
    ),
    "placing": lambda channel: ShardsStub(channel).Place(shards_pb2.PlaceRequest(token=TOKEN)),
}


def opened(address: str, spoken: ProtocolRange) -> grpc.aio.Channel:
    options = (("grpc.primary_user_agent", user_agent(spoken)),)
    return grpc.aio.insecure_channel(address, options=options)


@pytest.mark.parametrize("spoken", [OLDER, LATER], ids=str)
async def test_other_versions_are_refused_with_both_ranges(spoken: ProtocolRange) -> None:
    store = MemoryStore()
    async with served(store) as world, opened(world.address, spoken) as channel:
        for name, call in CALLS.items():
            with pytest.raises(grpc.RpcError) as raised:
                await call(channel)
            error = from_rpc_error(raised.value, world.address)
            assert isinstance(error, ProtocolMismatch), name
            assert str(spoken) in error.seen
            assert str(OWN_PROTOCOLS) in error.expected
        assert not await store.keys("/shoal/v1/jobs/"), "a refused call has begun a job"


async def test_a_client_of_the_next_release_uses_the_common_version() -> None:
    async with (
        served(MemoryStore()) as world,
        opened(world.address, NEXT_RELEASE) as channel,
    ):
        notice = await first_notice(channel, NEXT_RELEASE)
    assert notice.admitted.protocol == NEWEST


async def test_a_client_without_a_user_agent_is_judged_by_its_request() -> None:
    """The Attend request of such a client has the versions that it speaks."""
    async with served(MemoryStore()) as world, grpc.aio.insecure_channel(world.address) as channel:
        alone = attend(OWN_PROTOCOLS, oldest=0)
        call = MembershipStub(channel).Attend(alone)
        assert (await call.read()).admitted.protocol == NEWEST
        call.cancel()
        with pytest.raises(grpc.RpcError) as raised:
            await MembershipStub(channel).Attend(attend(LATER, oldest=0)).read()
    assert isinstance(from_rpc_error(raised.value, world.address), ProtocolMismatch)
