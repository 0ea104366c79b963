"""Limits on jobs, rendezvous keys and waits: calls beyond them get an error with the option."""

import asyncio
import time

import grpc.aio
import pytest
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import DeadlineExceeded, InvalidSpec, Overloaded
from shoal_proto.incarnation import new_incarnation
from shoal_proto.protocol import OWN_PROTOCOLS
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1 import rendezvous_pb2, shards_pb2
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub
from shoal_proto.v1.shards_pb2_grpc import ShardsStub
from shoal_server.serving.admission.config import JobLimits

BRIEF = JobLimits(call_wait_s=0.1, rendezvous_wait_s=0.1, rendezvous_keys=2, max_jobs=1)
AN_HOUR_S = 3600.0


def attending(job: str) -> pb.AttendRequest:
    return pb.AttendRequest(
        protocol=OWN_PROTOCOLS.newest,
        oldest_protocol=OWN_PROTOCOLS.oldest,
        token=Token(job=job, member_id="s", incarnation=new_incarnation()),
        spec=pb.JobSpec(job=job, min_members=1, max_members=1, desired_members=1),
        info=pb.MemberInfo(host="h", pid=2, address="127.0.0.1"),
    )


async def test_a_job_beyond_the_limit_is_refused() -> None:
    """The existing job can still be joined."""
    async with served(MemoryStore(), bounds=BRIEF) as world:
        await world.training("a")
        async with grpc.aio.insecure_channel(world.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await MembershipStub(channel).Attend(attending("another")).read()
            error = from_rpc_error(refused.value, world.address)
            assert isinstance(error, Overloaded) and "--max-jobs" in str(error)
        await asyncio.to_thread(world.client("b", desired=1).join)
        assert [actor.job.spec.job for actor in world.coordinator.registry.actors()] == ["j"]


async def test_waits_end_at_the_configured_limits() -> None:
    """A caller's limit of an hour does not prolong the wait."""
    async with served(MemoryStore(), bounds=BRIEF) as world:
        (member,) = await world.training("a")
        began_s = time.monotonic()
        async with grpc.aio.insecure_channel(world.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ShardsStub(channel).GetMap(
                    shards_pb2.GetMapRequest(token=member.token, wait_s=AN_HOUR_S)
                )
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await RendezvousStub(channel).Get(
                    rendezvous_pb2.StoreGetRequest(
                        token=member.token, keys=["never"], timeout_s=AN_HOUR_S
                    )
                )
            error = from_rpc_error(late.value, "it")
            assert isinstance(error, DeadlineExceeded)
            assert "within 0.1 s" in str(error) and "--rendezvous-wait-s" in str(error)
        assert time.monotonic() - began_s < 30.0


async def test_a_key_for_a_full_rendezvous_store_is_refused() -> None:
    async with served(MemoryStore(), bounds=BRIEF) as world:
        (member,) = await world.training("a")
        async with grpc.aio.insecure_channel(world.address) as channel:

            async def put(key: str) -> None:
                pairs = [rendezvous_pb2.StorePair(key=key, value=b"1234")]
                request = rendezvous_pb2.StoreSetRequest(token=member.token, pairs=pairs)
                await RendezvousStub(channel).Set(request)

            await put("a")
            await put("b")
            with pytest.raises(grpc.aio.AioRpcError) as full:
                await put("c")
        assert isinstance(from_rpc_error(full.value, "it"), Overloaded)
        num_bytes, num_keys = world.coordinator.rendezvous.held
        assert num_keys == 2 and num_bytes > 8


@pytest.mark.parametrize("name", list(vars(JobLimits())))
def test_a_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match=f"--{name.replace('_', '-')}"):
        JobLimits(**{name: 0})
