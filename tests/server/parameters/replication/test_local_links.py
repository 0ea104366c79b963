"""Links on one machine, on which a message counts as received before it is read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest
import torch
from support.clusters.assignment_records import write_assignments
from support.clusters.parameter_servers import config

from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import ImageChunk, ImageStart
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.etcd.memory import MemoryStore
from shoal_server.parameters.bulk import wire
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.process import RunningServer, running
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.replication.wire import frames
from shoal_server.parameters.replication.wire.streams import BulkStream, PeerStream, open_stream
from shoal_server.parameters.shard.dense import DensePush, new_dense_shard
from shoal_server.parameters.shard.record import UpdateRecord

JOB, EPOCH = "job", 3
PRIMARY = Holder("ps-9", "one")
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
ANSWER_S = 30.0
SILENCE_S = 0.3


class Shards:
    """A shard of a server that does not run, and the frames that replicate it."""

    def __init__(self) -> None:
        block = Block(parameter="p", num_elements=4)
        spec = Shard(shard_id=0, server_id="ps-9", epoch=EPOCH, dtype="float32", blocks=[block])
        self._shard = new_dense_shard(spec, SGD, bytearray(16))
        self._records: list[UpdateRecord] = []
        self._shard.subscribe(self._records.append)

    def pushed(self) -> pb.FollowRequest:
        sequence = len(self._records) + 1
        push = DensePush(
            session="s",
            sequence=sequence,
            epoch=EPOCH,
            base_version=sequence,
            lr=None,
            blocks=[0],
            gradient=torch.ones(4).numpy().tobytes(),
        )
        self._shard.push(push, lambda session: True)
        (message,) = frames.of_record(JOB, 0, EPOCH, self._records[-1])
        assert isinstance(message, pb.FollowRequest)
        return message

    def image(self) -> list[frames.Frame]:
        with self._shard.image() as image:
            start = ImageStart((JOB, 0), EPOCH, 1, 1, image.version, image.num_chunks)
            parts: list[frames.Frame] = [frames.of_image_start(start, image.header)]
            for index in range(image.num_chunks):
                parts += frames.of_chunk(ImageChunk((JOB, 0), 1, index), bytes(image.chunk(index)))
        return parts


@dataclass
class World:
    """A server, and its fake primary, whose shard the server copies."""

    server: RunningServer
    store: MemoryStore
    shards: Shards = field(default_factory=Shards)

    @property
    def stream(self) -> AbstractAsyncContextManager[PeerStream]:
        return open_stream(self.server.address)

    @property
    def version(self) -> int:
        replica = self.server.replicas._catalog.find(JOB, 0)
        return replica.state.version if replica is not None else 0

    def record(self) -> ShardAssignment:
        found = self.server.replicas.assignment(JOB, 0)
        assert found is not None
        return found

    async def write(self, primary: Holder, *backups: Holder, epoch: int = EPOCH) -> None:
        shard = ShardAssignment(
            shard_id=0,
            epoch=epoch,
            primary=primary,
            backups=backups,
            joining=None if backups or primary == self.me else self.me,
            content=ShardContent.PRESENT,
        )
        await write_assignments(self.store, JobAssignments(job=JOB, copies=2, shards=(shard,)))
        await self.server.replicas.refresh(JOB)

    @property
    def me(self) -> Holder:
        return self.server.replicas.me

    async def follow(self, stream: PeerStream) -> None:
        """Make the server a backup in step, over this stream."""
        assert isinstance(stream, BulkStream)
        assert stream.is_in_memory
        await self.write(PRIMARY)
        primary = pb.Holder(server_id=PRIMARY.server_id, incarnation=PRIMARY.incarnation)
        hello = pb.Hello(primary=primary, link=1, torch_version=torch.__version__)
        await stream.write(pb.FollowRequest(hello=hello))
        for frame in self.shards.image():
            await stream.write(frame)
        await self.until(lambda: self.version == 1)
        await self.write(PRIMARY, self.me)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(ANSWER_S):
            while not is_so():  # noqa: ASYNC110 - the state of a server, which sends no event
                await asyncio.sleep(0.01)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    store = MemoryStore()
    timeouts = PeerTimeouts(beat_s=0.05, silence_s=SILENCE_S)
    async with running(config("ps-0", timeouts=timeouts), store) as server:
        yield World(server, store)
    await store.close()


async def test_a_backup_that_cannot_read_an_update_does_not_lead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unreadable update follows a readable one, and may have been acknowledged. The shard is
    recorded as lost, rather than led without that update."""
    go_on = asyncio.Event()
    reached = asyncio.Event()

    async def await_capacity(_: ReceivedUpdates) -> None:
        reached.set()
        await go_on.wait()

    async with world.stream as stream:
        await world.follow(stream)
        monkeypatch.setattr(ReceivedUpdates, "has_capacity", property(lambda _: go_on.is_set()))
        monkeypatch.setattr(ReceivedUpdates, "await_capacity", await_capacity)
        await stream.write(world.shards.pushed())
        unreadable = world.shards.pushed()
        unreadable.record.first.checksum ^= 1
        await stream.write(unreadable)
        async with asyncio.timeout(ANSWER_S):
            await reached.wait()
        await world.write(world.me, epoch=EPOCH + 1)
        go_on.set()
        await world.until(lambda: world.record().epoch > EPOCH + 1)
    assert (world.record().content, world.version) == (ShardContent.LOST, 0)


async def test_a_backup_that_takes_over_reads_unread_updates_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PAUSE_S", 3600.0)
    async with world.stream as stream:
        await world.follow(stream)
        for _ in range(2):
            push = world.shards.pushed()
            push.record.answer_may_wait = True
            await stream.write(push)
            await world.until(lambda: world.version >= 2)
        assert world.version == 2, "the second update is unread"
        await world.write(world.me, epoch=EPOCH + 1)
        await world.until(lambda: world.version == 3)
    assert world.record().primary == world.me


async def test_a_halted_primary_is_succeeded_although_the_socket_is_full(world: World) -> None:
    """The backup has more replies for the primary than the kernel accepts."""
    async with world.stream as stream:
        await world.follow(stream)
        for _ in range(2_000):
            await stream.write(pb.FollowRequest(beat=pb.FollowBeat()))
        await world.until(lambda: world.record().primary == world.me)
    assert (world.record().epoch, world.version) == (EPOCH + 1, 1)
