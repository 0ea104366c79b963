"""A shard with a backup in step and a joining server: both get the same, however far one lags."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
import torch
from support.clusters.assignment_records import write_assignments
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import config

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.parameters.bulk.arena_slots import NUM_SLOTS
from shoal_server.parameters.process import RunningServer, running
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.shard.dense import DensePush, new_dense_shard
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica

JOB, KEY = "job", ("job", 0)
NUM_ELEMENTS = 2048
"""Size of a gradient that is sent through shared memory."""
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
LIMIT_S = 30.0


@dataclass
class World:
    """Three servers on this machine; the first one leads the shard."""

    primary: RunningServer
    backup: RunningServer
    joiner: RunningServer

    def __post_init__(self) -> None:
        self.gradient = bytearray(4 * NUM_ELEMENTS)
        """Memory of a worker, which reuses it for each push."""
        self.expected = torch.zeros(NUM_ELEMENTS)

    def create(self) -> None:
        block = Block(parameter="p", num_elements=NUM_ELEMENTS)
        spec = Shard(shard_id=0, epoch=1, dtype="float32", blocks=[block])
        shard = new_dense_shard(spec, SGD, bytearray(4 * NUM_ELEMENTS))
        replica = ShardReplica(JOB, shard, ReplicaRole.PRIMARY, 1)
        assert self.primary.catalog.add(replica)
        self.primary.replicas.created(replica)

    def copy_at(self, server: RunningServer) -> ShardReplica | None:
        return server.catalog.find(*KEY)

    def version_at(self, server: RunningServer) -> int:
        copy = self.copy_at(server)
        return copy.state.version if copy is not None else 0

    def values_at(self, server: RunningServer) -> torch.Tensor:
        copy = self.copy_at(server)
        assert copy is not None
        return copy.state.body.flat_tensors()["values"]

    def push(self) -> None:
        """Apply a push; the worker reuses its memory as soon as it is applied."""
        led = self.copy_at(self.primary)
        assert led is not None
        gradient = torch.frombuffer(self.gradient, dtype=torch.float32)
        gradient.fill_(-float(led.state.version))
        self.expected -= gradient
        push = DensePush(
            session="s",
            sequence=led.state.version,
            epoch=1,
            base_version=led.state.version,
            lr=None,
            blocks=[0],
            gradient=memoryview(self.gradient),
            is_borrowed=True,
        )
        led.state.push(push, lambda session: True, on_applied=led.leading.report_applied)
        gradient.fill_(float("nan"))

    def follows(self, server: RunningServer) -> bool:
        return self.primary.replicas.versions(*KEY).get(server.replicas.me, 0) > 0

    def record(self) -> ShardAssignment:
        record = self.primary.replicas.assignment(*KEY)
        assert record is not None
        return record

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_so():  # noqa: ASYNC110 - the state of servers, which send no event
                await asyncio.sleep(0.001)


async def test_an_update_that_waits_for_one_follower_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The joining server reads nothing, and the memory that it shares with the primary is full. The
    update that waits for it is in memory that the backup has read and later pushes reuse."""
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(running(config(f"ps-{number}"), store))
            for number in range(3)
        ]
        world = World(*servers)
        me, backup, joiner = (server.replicas.me for server in servers)
        first = ShardAssignment(shard_id=0, epoch=1, primary=me, joining=backup)
        await write_assignments(store, JobAssignments(job=JOB, copies=3, shards=(first,)))
        await world.primary.replicas.refresh(JOB)
        world.create()
        await world.until(lambda: world.record().backups == (backup,))

        reads = asyncio.Event()
        received = world.joiner.replicas.received
        await_capacity, has_capacity = ReceivedUpdates.await_capacity, ReceivedUpdates.has_capacity

        async def held(self: ReceivedUpdates) -> None:
            if self is received:
                await reads.wait()
            await await_capacity(self)

        def has(self: ReceivedUpdates) -> bool:
            assert has_capacity.fget is not None
            return (self is not received or reads.is_set()) and has_capacity.fget(self)

        monkeypatch.setattr(ReceivedUpdates, "await_capacity", held)
        monkeypatch.setattr(ReceivedUpdates, "has_capacity", property(has))
        await world.primary.replicas.change_assignments(
            JOB, [0], lambda record: replace(record, joining=joiner)
        )
        await world.until(lambda: world.follows(world.joiner))
        for _ in range(4 * NUM_SLOTS):
            world.push()
            await world.until(
                lambda: world.version_at(world.backup) == world.version_at(world.primary)
            )
        reads.set()
        last = world.version_at(world.primary)
        await world.until(lambda: world.version_at(world.joiner) == last)
        for server in servers:
            assert torch.equal(world.values_at(server), world.expected), server.server_id
    await store.close()
