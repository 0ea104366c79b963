"""Links on one machine, on which a message counts as received before it is read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import pytest
import torch
from support.clusters.fake_primary import ANSWER_S, EPOCH, PRIMARY, Backup, FakePrimary
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import config

from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent
from shoal_server.parameters.bulk import wire
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.process import running
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.replication.wire.streams import BulkStream, PeerStream, open_stream

SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
SILENCE_S = 0.3


@dataclass(kw_only=True)
class World(Backup):
    """The server, with links on this machine, and its primary."""

    primary: FakePrimary = field(default_factory=lambda: FakePrimary(4, SGD))

    @property
    def stream(self) -> AbstractAsyncContextManager[PeerStream]:
        return open_stream(self.server.address)

    async def assign(self, primary: Holder, *backups: Holder, epoch: int = EPOCH) -> None:
        shard = ShardAssignment(
            shard_id=0,
            epoch=epoch,
            primary=primary,
            backups=backups,
            joining=None if backups or primary == self.me else self.me,
            content=ShardContent.PRESENT,
        )
        await self.write(shard)

    async def follow(self, stream: PeerStream) -> None:
        """Make the server a backup in step, over this stream."""
        assert isinstance(stream, BulkStream)
        assert stream.is_in_memory
        await self.assign(PRIMARY)
        primary = pb.Holder(server_id=PRIMARY.server_id, incarnation=PRIMARY.incarnation)
        hello = pb.Hello(primary=primary, link=1, torch_version=torch.__version__)
        await stream.write(pb.FollowRequest(hello=hello))
        for frame in self.primary.image():
            await stream.write(frame)
        await self.until(lambda: self.version == 1)
        await self.assign(PRIMARY, self.me)

    def pushed(self) -> pb.FollowRequest:
        """Push to the primary; return the message that replicates it."""
        (message,) = self.primary.frames_of(self.primary.push())
        assert isinstance(message, pb.FollowRequest)
        return message


@pytest.fixture
async def world() -> AsyncIterator[World]:
    store = MemoryStore()
    timeouts = PeerTimeouts(beat_s=0.05, silence_s=SILENCE_S)
    async with running(config("ps-0", timeouts=timeouts), store) as server:
        yield World(server=server, store=store)
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
        await stream.write(world.pushed())
        unreadable = world.pushed()
        unreadable.record.first.checksum ^= 1
        await stream.write(unreadable)
        async with asyncio.timeout(ANSWER_S):
            await reached.wait()
        await world.assign(world.me, epoch=EPOCH + 1)
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
            push = world.pushed()
            push.record.answer_may_wait = True
            await stream.write(push)
            await world.until(lambda: world.version >= 2)
        assert world.version == 2, "the second update is unread"
        await world.assign(world.me, epoch=EPOCH + 1)
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
