"""Rendezvous keys of a generation after a change of leaders, which loses them."""

import asyncio

import grpc.aio
import pytest
from support.clusters.coordinator_world import Served, entered, served
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import GenerationBroken, ShoalError
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import rendezvous_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub

WAIT_S = 60.0


async def get(world: Served, token: Token, key: str) -> bytes:
    """Wait for the key, and return its value. Raises the coordinator's refusal."""
    async with grpc.aio.insecure_channel(world.address) as channel:
        request = pb.StoreGetRequest(token=token, keys=[key], timeout_s=WAIT_S)
        try:
            reply = await RendezvousStub(channel).Get(request)
        except grpc.RpcError as error:
            raise from_rpc_error(error, world.address) from None
        return reply.values[0]


async def set_key(world: Served, token: Token, key: str) -> None:
    async with grpc.aio.insecure_channel(world.address) as channel:
        pairs = [pb.StorePair(key=key, value=b"1")]
        await RendezvousStub(channel).Set(pb.StoreSetRequest(token=token, pairs=pairs))


async def test_a_wait_for_a_key_of_the_last_leader_is_refused_at_once() -> None:
    """The lost keys are not set again; the next generation has keys of its own."""
    async with served(MemoryStore()) as world:
        a, b = await world.training("a", "b")
        await set_key(world, a.token, "address/0")
        assert await get(world, b.token, "address/0") == b"1"
        await world.coordinator.step_down()
        await world.coordinator.lead(())
        with pytest.raises(GenerationBroken, match="lost"):
            await asyncio.wait_for(admitted_get(world, b.token, "address/0"), WAIT_S / 2)
        for member in (a, b):
            await asyncio.to_thread(member.report_broken, "the keys are lost")
        for member in (a, b):
            assert await asyncio.to_thread(member.await_break, 1, WAIT_S / 2)
            await asyncio.to_thread(lambda m=member: m.settle(0, has_state=True))
        await asyncio.gather(entered(a, 1), entered(b, 1))
        await set_key(world, a.token, "address/0")
        assert await get(world, b.token, "address/0") == b"1"


async def admitted_get(world: Served, token: Token, key: str) -> bytes:
    """Call `get` until the new leader knows the member again."""
    while True:
        try:
            return await get(world, token, key)
        except GenerationBroken:
            raise
        except ShoalError:
            await asyncio.sleep(0)  # until the member has joined again, in a thread of its own
