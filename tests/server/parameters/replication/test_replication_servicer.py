"""The Replication service on the wire: what a backup takes from a primary, and what it refuses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import TypeVar

import grpc
import grpc.aio
import pytest
import torch
from support.clusters.assignment_records import write_assignments
from support.clusters.parameter_servers import config

from shoal_proto.errors import (
    ChecksumMismatch,
    InternalError,
    MalformedMessage,
    ShoalError,
    WrongEpoch,
)
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.core.shards.assignments import Holder, JobAssignments, ShardAssignment
from shoal_server.etcd.memory import MemoryStore
from shoal_server.parameters.process import RunningServer, running
from shoal_server.parameters.replication import frames
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.dense import DensePush, is_dense, new_dense_shard
from shoal_server.parameters.shard.image import UpdateRecord
from shoal_server.parameters.shard.replica import Role, ShardReplica
from shoal_server.parameters.shard.workers import Workers

JOB, EPOCH = "job", 3
PRIMARY = Holder("ps-9", "one")
NUM_ELEMENTS = 600_000
ADAM = OptimizerSpec(kind="adam", groups=[HyperParameters(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)])
ANSWER_S = 30.0

Frames = list[pb.FollowRequest]
T = TypeVar("T")


def as_message(frame: frames.Frame) -> pb.FollowRequest:
    return pb.FollowRequest.FromString(frames.serialize(frame))


class Primary:
    """A shard of a server that is not there, and the frames that tell of it."""

    def __init__(self) -> None:
        block = Block(parameter="p", num_elements=NUM_ELEMENTS)
        spec = Shard(shard_id=0, server_id="ps-9", epoch=EPOCH, dtype="float32", blocks=[block])
        self.shard = new_dense_shard(spec, ADAM, bytearray(4 * NUM_ELEMENTS))
        self._records: list[UpdateRecord] = []
        self.shard.subscribe(self._records.append)
        self._sequence = 0

    def push(self) -> UpdateRecord:
        self._sequence += 1
        gradient = torch.full((NUM_ELEMENTS,), float(self._sequence)).numpy().tobytes()
        push = DensePush(
            session="s",
            sequence=self._sequence,
            epoch=EPOCH,
            base_version=self._sequence,
            lr=None,
            blocks=[0],
            gradient=gradient,
        )
        self.shard.push(push, lambda session: True)
        return self._records[-1]

    def image(self) -> Frames:
        return [as_message(f) for f in frames.of_image(JOB, EPOCH, self.shard.image())]

    def told(self, record: UpdateRecord, epoch: int = EPOCH) -> Frames:
        return [as_message(f) for f in frames.of_record(JOB, 0, epoch, record)]


@dataclass(kw_only=True)
class World:
    """A server that is to become the backup of the one shard."""

    server: RunningServer
    store: MemoryStore
    stub: ReplicationStub
    primary: Primary

    @property
    def version(self) -> int:
        """Of the copy that the server has; 0: it has none."""
        replica = self.server.replicas.replica(JOB, 0)
        return 0 if replica is None else replica.state.version

    async def assert_same(self) -> None:
        """The copy is what the primary has, to the last bit."""
        replica = self.server.replicas.replica(JOB, 0)
        assert replica is not None
        await self.server.replicas.settle(replica)
        copy, own = replica.state.image(), self.primary.shard.image()
        assert (copy.version, list(copy.sessions)) == (own.version, list(own.sessions))
        assert copy.tensors.keys() == own.tensors.keys()
        for name, tensor in own.tensors.items():
            assert frames.bytes_of(copy.tensors[name]) == frames.bytes_of(tensor), name


@pytest.fixture
async def world() -> AsyncIterator[World]:
    store = MemoryStore()
    async with (
        running(config("ps-0"), store) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        shard = ShardAssignment(
            shard_id=0, epoch=EPOCH, primary=PRIMARY, joining=server.replicas.me
        )
        replica = JobAssignments(job=JOB, copies=2, shards=(shard,))
        await write_assignments(store, replica)
        yield World(server=server, store=store, stub=ReplicationStub(channel), primary=Primary())
    await store.close()


async def tell(
    world: World, requests: Iterable[pb.FollowRequest], *, hold: bool = False
) -> list[pb.FollowReply]:
    """What a stream of its own is answered, from the hello on. `hold`: leave it open, for one that
    is to be refused: grpc.aio loses the server's status if it still writes when that comes."""

    async def written() -> AsyncIterator[pb.FollowRequest]:
        primary = pb.Holder(server_id=PRIMARY.server_id, incarnation=PRIMARY.incarnation)
        yield pb.FollowRequest(hello=pb.Hello(primary=primary))
        for request in requests:
            yield request
        if hold:
            await asyncio.Event().wait()

    try:
        async with asyncio.timeout(ANSWER_S):
            return [reply async for reply in world.stub.Follow(written())]
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "ps-0") from None


def outcomes(replies: Iterable[pb.FollowReply]) -> list[int | type[ShoalError]]:
    """Of each record or image: the version that was taken, or why none was."""
    return [
        type(from_detail(reply.error)) if reply.HasField("error") else reply.version
        for reply in replies
        if reply.job
    ]


async def test_a_copy_is_the_same_to_the_last_bit(world: World) -> None:
    """An image, and what was pushed since: each acknowledged with its version, in order."""
    world.primary.push()
    image = world.primary.image()
    later = [world.primary.push() for _ in range(3)]
    told = [*image, *(frame for record in later for frame in world.primary.told(record))]
    assert outcomes(await tell(world, told)) == [2, 3, 4, 5]
    await world.assert_same()


async def test_a_beat_is_answered(world: World) -> None:
    """With an empty reply, so that the primary knows that somebody is there."""
    replies = await tell(world, [pb.FollowRequest(beat=pb.FollowBeat())])
    assert replies
    assert set(map(str, replies)) == {str(pb.FollowReply())}


def corrupted(told: Frames) -> Frames:
    """One bit of the last bytes is another one."""
    changed = [pb.FollowRequest.FromString(frame.SerializeToString()) for frame in told]
    last = changed[-1].bytes
    last.data = last.data[:-1] + bytes([last.data[-1] ^ 1])
    return changed


def another_dtype(told: Frames) -> Frames:
    told[0].image.image.tensors[0].dtype = "float8"
    return told[:1]


def another_shape(told: Frames) -> Frames:
    told[0].image.image.tensors[0].shape[0] += 1
    return told[:1]


def longer_tensor(told: Frames) -> Frames:
    told[0].image.image.tensors[-1].num_bytes += 4
    return told[:1]


def too_large(told: Frames) -> Frames:
    told[0].image.num_bytes = 1 << 60
    return told[:1]


# Each ends with the message that is to be refused.
BAD_FRAMES: dict[str, tuple[Callable[[Frames], Frames], type[ShoalError]]] = {
    "corrupted": (corrupted, ChecksumMismatch),
    "bytes twice": (lambda told: [*told, told[-1]], MalformedMessage),
    "bytes of nothing": (lambda told: told[1:2], MalformedMessage),
    "another within it": (lambda told: [*told[:-1], told[0]], MalformedMessage),
    "hello twice": (lambda told: [pb.FollowRequest(hello=pb.Hello())], MalformedMessage),
    "nothing at all": (lambda told: [pb.FollowRequest()], MalformedMessage),
}
BAD_IMAGES = {
    **BAD_FRAMES,
    "another dtype": (another_dtype, MalformedMessage),
    "another shape": (another_shape, MalformedMessage),
    "a longer tensor": (longer_tensor, MalformedMessage),
    "too large": (too_large, MalformedMessage),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
async def test_no_bad_image_is_kept(world: World, name: str) -> None:
    """The stream ends with what is wrong; the next one makes it good."""
    spoil, kind = BAD_IMAGES[name]
    spoiled = spoil(world.primary.image())
    taken_first = name == "bytes twice"
    with pytest.raises(kind):
        await tell(world, spoiled, hold=True)
    assert world.version == int(taken_first)
    assert outcomes(await tell(world, world.primary.image())) == [1]
    await world.assert_same()


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_no_bad_record_is_applied(world: World, name: str) -> None:
    """The stream ends with what is wrong, the copy stays as it was, and the next one goes on."""
    assert outcomes(await tell(world, world.primary.image())) == [1]
    spoil, kind = BAD_FRAMES[name]
    spoiled = spoil(world.primary.told(world.primary.push()))
    with pytest.raises(kind):
        await tell(world, spoiled, hold=True)
    replica = world.server.replicas.replica(JOB, 0)
    assert replica is not None
    await world.server.replicas.settle(replica)
    assert world.version == (2 if name == "bytes twice" else 1)
    assert outcomes(await tell(world, world.primary.image())) == [2]
    await world.assert_same()


async def test_what_is_cut_off_counts_as_never_sent(world: World) -> None:
    """A primary that dies within an image or a record leaves nothing of it behind."""
    assert outcomes(await tell(world, world.primary.image()[:-1])) == []
    assert world.version == 0
    assert outcomes(await tell(world, world.primary.image())) == [1]
    assert outcomes(await tell(world, world.primary.told(world.primary.push())[:-1])) == []
    assert world.version == 1


async def test_records_are_taken_in_order_or_not_at_all(world: World) -> None:
    """One that comes twice, too early or before its image is refused; those in order go on."""
    image = world.primary.image()
    first, second, third = (world.primary.told(world.primary.push()) for _ in range(3))
    told = [*first, *image, *second, *first, *first, *third, *second, *third]
    refused = InternalError
    assert outcomes(await tell(world, told)) == [refused, 1, refused, 2, refused, refused, 3, 4]
    await world.assert_same()


async def test_only_the_primary_of_the_record_is_believed(world: World) -> None:
    """Another epoch, another primary, a shard or a job that nobody knows: nothing changes."""
    record = world.primary.push()
    for epoch in (EPOCH - 1, EPOCH + 1):
        told = [as_message(f) for f in frames.of_image(JOB, epoch, world.primary.shard.image())]
        assert outcomes(await tell(world, told)) == [WrongEpoch]
    another = frames.of_image("another", EPOCH, world.primary.shard.image())
    stranger = list(map(as_message, another))
    assert outcomes(await tell(world, stranger)) == [WrongEpoch]
    assert world.version == 0
    assert outcomes(await tell(world, world.primary.image())) == [2]
    assert outcomes(await tell(world, world.primary.told(record, EPOCH - 1))) == [WrongEpoch]
    deposed = ShardAssignment(
        shard_id=0,
        epoch=EPOCH + 1,
        primary=Holder("ps-8", "one"),
        backups=(world.server.replicas.me,),
    )
    replica = JobAssignments(job=JOB, copies=2, shards=(deposed,))
    await write_assignments(world.store, replica)
    assert outcomes(await tell(world, world.primary.image())) == [WrongEpoch]
    await world.server.replicas.refresh(JOB)
    assert outcomes(await tell(world, world.primary.told(world.primary.push()))) == [WrongEpoch]


async def test_a_stream_without_a_hello_is_refused(world: World) -> None:
    """Whoever does not say who it is, is not listened to."""

    async def anonymous() -> AsyncIterator[pb.FollowRequest]:
        yield world.primary.image()[0]
        await asyncio.Event().wait()

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in world.stub.Follow(anonymous()):
            pass
    assert isinstance(from_rpc_error(failed.value, "ps-0"), MalformedMessage)
    assert world.version == 0


class Gate:
    """Holds one awaited step of a server up, until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.go_on.wait()


async def write_holding(world: World, assignment: ShardAssignment) -> None:
    """Have the record say so, and the server know it."""
    replica = JobAssignments(job=JOB, copies=2, shards=(assignment,))
    await write_assignments(world.store, replica)
    await world.server.replicas.refresh(JOB)


def led_by(world: World) -> ShardAssignment:
    """What the record says once the server has taken over from its primary."""
    return ShardAssignment(shard_id=0, epoch=EPOCH + 1, primary=world.server.replicas.me)


async def led(world: World) -> ShardReplica:
    """The shard, once the server leads it."""
    async with asyncio.timeout(ANSWER_S):
        await catalog_of(world).wait_for(JOB, [0], ANSWER_S)
    replica = world.server.replicas.replica(JOB, 0)
    assert replica is not None
    assert replica.role is Role.PRIMARY
    return replica


def catalog_of(world: World) -> Catalog:
    return world.server.replicas._catalog


def received_of(world: World) -> ReceivedUpdates:
    """What the server has received of its primaries."""
    bound = world.server.replicas.settle
    assert isinstance(bound, MethodType)
    assert isinstance(bound.__self__, ReceivedUpdates)
    return bound.__self__


async def in_step(world: World, version: int) -> None:
    """Give the server a copy of that version, and have the record list it as in step."""
    assert outcomes(await tell(world, world.primary.image())) == [version]
    # As long as there is a stream of the primary, the server does not take over by itself.
    world.server.replicas.stream_opened(PRIMARY)
    backup = ShardAssignment(
        shard_id=0, epoch=EPOCH, primary=PRIMARY, backups=(world.server.replicas.me,)
    )
    await write_holding(world, backup)


async def test_an_image_of_a_deposed_primary_does_not_replace_what_is_led_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes over while it restores an image of the last primary, and acknowledges pushes
    of its own: these stay, it leads on, and the image is refused."""
    await in_step(world, 1)
    image = world.primary.image()
    gate, run = Gate(), Workers.__call__

    async def held_up(workers: Workers, num_bytes: int, work: Callable[[], T]) -> T:
        result = await run(workers, num_bytes, work)
        await gate()
        return result

    monkeypatch.setattr(Workers, "__call__", held_up)
    telling = asyncio.create_task(tell(world, image))
    async with asyncio.timeout(ANSWER_S):
        await gate.reached.wait()
    await write_holding(world, led_by(world))
    replica = await led(world)
    gradient = torch.ones(NUM_ELEMENTS).numpy().tobytes()
    for sequence in (1, 2):
        push = DensePush(
            session="t",
            sequence=sequence,
            epoch=EPOCH + 1,
            base_version=1,
            lr=None,
            blocks=[0],
            gradient=gradient,
        )
        assert is_dense(replica.state)
        replica.state.push(push, lambda session: True)
    gate.go_on.set()
    assert outcomes(await telling) == [WrongEpoch]
    assert world.server.replicas.replica(JOB, 0) is replica
    assert (replica.role, replica.epoch, replica.state.version) == (Role.PRIMARY, EPOCH + 1, 3)
    await replica.receipts.wait_safe(3)


async def test_a_record_of_a_deposed_primary_is_not_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came while there was no room for it, and when there is, the server leads the shard: the
    last primary must not tell anybody that the push is safe, and the shard stays."""
    await in_step(world, 1)
    received, gate = received_of(world), Gate()
    wait_for = received._room.wait_for

    async def held_up(is_so: Callable[[], bool]) -> bool:
        await gate()
        return await wait_for(is_so)

    monkeypatch.setattr(received._room, "wait_for", held_up)
    telling = asyncio.create_task(tell(world, world.primary.told(world.primary.push())))
    async with asyncio.timeout(ANSWER_S):
        await gate.reached.wait()
    await write_holding(world, led_by(world))
    replica = await led(world)
    gate.go_on.set()
    assert outcomes(await telling) == [WrongEpoch]
    await received.settle(replica)
    assert world.server.replicas.replica(JOB, 0) is replica
    assert (replica.role, replica.state.version) == (Role.PRIMARY, 1)


async def test_what_was_acknowledged_is_applied_before_the_copy_leads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an image has come for it meanwhile, which waits for the same: and the stream that
    brought the image may end."""
    await in_step(world, 1)
    received, gate = received_of(world), Gate()
    run = received._run

    async def held_up(num_bytes: int, work: Callable[[], T]) -> T:
        await gate()
        return await run(num_bytes, work)

    monkeypatch.setattr(received, "_run", held_up)
    assert outcomes(await tell(world, world.primary.told(world.primary.push()))) == [2]
    settle, settling = received.settle_key, asyncio.Event()

    async def noted(key: tuple[str, int]) -> None:
        settling.set()
        await settle(key)

    monkeypatch.setattr(received, "settle_key", noted)
    telling = asyncio.create_task(tell(world, world.primary.image(), hold=True))
    async with asyncio.timeout(ANSWER_S):
        await gate.reached.wait()
        await settling.wait()
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    await write_holding(world, led_by(world))
    replica = world.server.replicas.replica(JOB, 0)
    assert replica is not None
    assert replica.role is Role.BACKUP
    gate.go_on.set()
    assert await led(world) is replica
    assert (replica.role, replica.state.version) == (Role.PRIMARY, 2)


async def test_an_image_that_is_older_than_the_copy_is_refused(world: World) -> None:
    """What the primary was told to be here must not go again, by a stream that was overtaken."""
    older = world.primary.image()
    world.primary.push()
    assert outcomes(await tell(world, world.primary.image())) == [2]
    assert outcomes(await tell(world, older)) == [InternalError]
    await world.assert_same()
