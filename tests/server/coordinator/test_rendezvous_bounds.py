"""Bounds of the rendezvous store: its bytes include keys, and waits that end leave nothing."""

import asyncio
import gc
import tracemalloc

import grpc.aio
import pytest
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import Overloaded
from shoal_proto.v1 import rendezvous_pb2 as pb
from shoal_proto.v1.rendezvous_pb2_grpc import RendezvousStub
from shoal_server.coordinator.rendezvous import MAX_ANSWERED, KeySpace
from shoal_server.serving.admission.config import JobLimits


def test_bytes_of_keys_count_as_those_of_values() -> None:
    """Regression: a million keys of 4 KiB without values took 3 GB."""
    space = KeySpace(limits=JobLimits(rendezvous_bytes=100_000))
    with pytest.raises(Overloaded, match="is full"):
        for number in range(1000):
            space.set(f"{number:04}" + "k" * 4000, b"")
    assert len(space.values) < 25
    for key in list(space.values):
        assert space.delete(key)
    assert space.num_bytes == 0
    space.set("a", b"x" * 50_000)
    space.set("a", b"x" * 60_000)  # replaces the value


def test_the_number_of_keys_is_bounded() -> None:
    """The error names the option. An existing key may change, and a deleted one leaves room."""
    space = KeySpace(limits=JobLimits(rendezvous_keys=3))
    for key in "abc":
        space.set(key, b"1")
    space.set("a", b"2")
    with pytest.raises(Overloaded, match="--rendezvous-keys"):
        space.set("d", b"")
    assert space.delete("b")
    space.set("d", b"")


def test_the_number_of_repeatable_calls_is_bounded() -> None:
    """Only the newest are recognised."""
    space = KeySpace()
    for call_id in range(1, MAX_ANSWERED + 2):
        space.add("a", 1, call_id)
    newest = MAX_ANSWERED + 1
    assert space.add("a", 1, newest) == newest
    assert space.add("a", 1, 1) == newest + 1


async def test_a_wait_that_times_out_leaves_nothing() -> None:
    space = KeySpace()
    tracemalloc.start()
    try:
        for number in range(100):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await space.wait_for((f"{number:04}" + "k" * 10_000,))
        gc.collect()  # errors refer to frames, and these to the keys
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


async def test_a_call_does_not_wait_again_for_a_key_that_was_set_and_deleted() -> None:
    """A later call for the same keys waits for the deleted key, the earlier one does not. Calls
    that give up affect no other."""
    space, keys = KeySpace(), ("a", "b")
    async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
        first = group.create_task(space.wait_for(keys))
        await asyncio.sleep(0)
        space.set("a", b"1")
        space.delete("a")
        second = group.create_task(space.wait_for(keys))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await space.wait_for(keys)
        space.set("b", b"1")
        await first
        assert not second.done()
        space.set("a", b"2")
        await second


async def test_a_value_that_is_no_number_is_no_counter() -> None:
    async with (
        served(MemoryStore()) as world,
        grpc.aio.insecure_channel(world.address) as channel,
    ):
        (member,) = await world.training("a")
        stub = RendezvousStub(channel)

        async def increased(value: bytes) -> int:
            pairs = [pb.StorePair(key="key", value=value)]
            await stub.Set(pb.StoreSetRequest(token=member.token, pairs=pairs))
            reply = await stub.Add(pb.StoreAddRequest(token=member.token, key="key", amount=1))
            return int(reply.count)

        for value in (b"seven", b"", b"9" * 5000, b"\xff"):
            with pytest.raises(grpc.aio.AioRpcError, match="is not a counter"):
                await increased(value)
        assert await increased(b"-7") == -6
