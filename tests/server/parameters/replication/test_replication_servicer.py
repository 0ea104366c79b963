"""The Replication service over gRPC: what a backup accepts from a primary, and what it refuses."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import pytest
import torch
from support.clusters.fake_primary import ANSWER_S, EPOCH, JOB, PRIMARY, Backup, FakePrimary
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import config
from support.clusters.snapshot_world import loaded

from shoal_proto.checksum import crc32
from shoal_proto.errors import ChecksumMismatch, MalformedMessage, ShoalError
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import Piece
from shoal_proto.v1.replication_pb2_grpc import ReplicationStub
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import (
    BackupRefusalReason,
    BackupRefused,
    BackupState,
    ImageInstalled,
    Offer,
    RecordsReceived,
    Reply,
)
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.assignments import ShardContent as Content
from shoal_server.parameters.comparison.digest import PieceWalk
from shoal_server.parameters.process import running
from shoal_server.parameters.replication.wire import frames, replies
from shoal_server.parameters.shard.dense import DensePush, is_dense
from shoal_server.parameters.shard.record import UpdateRecord
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica

KEY = (JOB, 0)
NUM_ELEMENTS = 600_000
ADAM = OptimizerSpec(kind="adam", groups=[HyperParameters(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)])

Frames = list[pb.FollowRequest]
T = TypeVar("T")
AnyCall = grpc.aio.StreamStreamCall[pb.FollowRequest, pb.FollowReply]


OFFER = frames.of_offer(Offer(KEY, EPOCH, 1))


class Primary(FakePrimary):
    """A fake primary that sends all of a frame in a gRPC message."""

    def __init__(self) -> None:
        super().__init__(NUM_ELEMENTS, ADAM)

    def image(self, epoch: int = EPOCH, job: str = JOB, begin: int = 0) -> Frames:  # type: ignore[override]
        return [frames.as_message(frame) for frame in super().image(epoch, job, begin)]

    def frames_of(self, record: UpdateRecord, epoch: int = EPOCH) -> Frames:  # type: ignore[override]
        return [frames.as_message(frame) for frame in super().frames_of(record, epoch)]


@dataclass(kw_only=True)
class World(Backup):
    """The server, with a stub for its calls, and its primary."""

    stub: ReplicationStub
    primary: Primary
    links: int = 0

    async def settle(self) -> None:
        await self.server.replicas.received.settle(self.copy())

    async def assert_same(self) -> None:
        """Check that the copy equals the primary's shard, bit for bit."""
        await self.settle()
        copy, own = loaded(self.copy().state), loaded(self.primary.shard)
        assert (copy.version, list(copy.sessions)) == (own.version, list(own.sessions))
        assert copy.tensors.keys() == own.tensors.keys()
        for name, tensor in own.tensors.items():
            assert torch.equal(copy.tensors[name], tensor), name


@pytest.fixture
async def world() -> AsyncIterator[World]:
    store = MemoryStore()
    async with (
        running(config("ps-0"), store) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        world = World(server=server, store=store, stub=ReplicationStub(channel), primary=Primary())
        me = server.replicas.me
        await world.write(
            ShardAssignment(
                shard_id=0, epoch=EPOCH, primary=PRIMARY, joining=me, content=Content.PRESENT
            )
        )
        yield world
    await store.close()


class Link:
    """Link from the primary to the server; with `images_of`, the stream for images of that link."""

    def __init__(self, world: World, *, images_of: int = 0) -> None:
        world.links += not images_of
        hello = pb.Hello(
            primary=pb.Holder(server_id=PRIMARY.server_id, incarnation=PRIMARY.incarnation),
            link=images_of or world.links,
            for_images=bool(images_of),
            torch_version=torch.__version__,
        )
        self.call = world.stub.Follow()
        self._hello = pb.FollowRequest(hello=hello)

    async def __aenter__(self) -> "Link":
        await self.call.write(self._hello)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.call.cancel()

    async def write(self, requests: Iterable[pb.FollowRequest]) -> None:
        for request in requests:
            await self.call.write(request)

    async def beat(self) -> pb.FollowReply:
        await self.call.write(pb.FollowRequest(beat=pb.FollowBeat()))
        async with asyncio.timeout(ANSWER_S):
            reply: pb.FollowReply = await self.call.read()
            return reply

    async def answers(self, num: int) -> list[Reply]:
        """Return the next replies, without those to heartbeats and chunks. Raises the call's
        error."""
        found: list[Reply] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                while len(found) < num:
                    message = await self.call.read()
                    assert message is not grpc.aio.EOF
                    if message.job and not message.HasField("taken"):
                        found.append(replies.decode(message))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "ps-0") from None
        return found

    async def request(self, requests: Iterable[pb.FollowRequest], num: int = 1) -> list[Reply]:
        await self.write(requests)
        return await self.answers(num)


def results(answers: Sequence[Reply]) -> list[int | BackupRefusalReason]:
    """Return the version of each answer, or the reason of a refusal."""
    return [
        answer.why if isinstance(answer, BackupRefused) else answer.version
        for answer in answers
        if isinstance(answer, RecordsReceived | ImageInstalled | BackupRefused)
    ]


async def test_a_copy_is_the_same_bit_for_bit(world: World) -> None:
    """The image and each later update are acknowledged with their versions, in order."""
    world.primary.push()
    async with Link(world) as link:
        assert await link.request([OFFER]) == [BackupState(KEY, EPOCH)]
        assert results(await link.request(world.primary.image())) == [2]
        for version in (3, 4, 5):
            assert results(await link.request(world.primary.frames_of(world.primary.push()))) == [
                version
            ]
    await world.assert_same()


async def test_a_heartbeat_is_answered(world: World) -> None:
    """The answer is an empty reply."""
    async with Link(world) as link:
        assert str(await link.beat()) == str(pb.FollowReply())


async def test_an_image_is_continued_over_a_new_link(world: World) -> None:
    """The image continues with the first chunk that has not arrived."""
    image = world.primary.image()
    starts = [i for i, frame in enumerate(image) if frame.HasField("chunk")]
    assert len(starts) > 2
    async with Link(world) as link:
        await link.write(image[: starts[2]])
        # Requests are read in order: the offer is answered after two chunks.
        (holds,) = await link.request([OFFER])
    assert isinstance(holds, BackupState)
    assert (holds.version, holds.image, holds.next_chunk) == (0, 1, 2)
    async with Link(world) as link:
        assert await link.request([OFFER]) == [holds]
        assert results(await link.request(world.primary.image(begin=2))) == [1]
    await world.assert_same()


async def test_a_copy_is_continued_over_a_new_link(world: World) -> None:
    """The answer to the offer has the copy's version, so that earlier updates need not be sent
    again."""
    async with Link(world) as link:
        assert results(await link.request(world.primary.image())) == [1]
        assert results(await link.request(world.primary.frames_of(world.primary.push()))) == [2]
    async with Link(world) as link:
        (holds,) = await link.request([OFFER])
        assert holds == BackupState(KEY, EPOCH, EPOCH, 1, 2)
        assert results(await link.request(world.primary.frames_of(world.primary.push()))) == [3]
    await world.assert_same()


async def test_a_copy_that_differs_is_dropped_and_replaced_by_an_image(world: World) -> None:
    """The primary sends digests of pieces. A copy that equals them stays."""
    walk = PieceWalk()
    async with Link(world) as link:
        assert results(await link.request(world.primary.image())) == [1]
        for _ in range(3):
            digest = frames.of_digest(KEY, EPOCH, walk.next(world.primary.shard))
            await link.write([digest])
        assert results(await link.request(world.primary.frames_of(world.primary.push()))) == [2]
        await world.settle()
        received = world.server.replicas.received
        assert (received.num_compared, received.num_different) == (3, 0)
        copy = world.copy().state
        assert is_dense(copy)
        copy.body.flat_tensors()["values"][5] += 1.0
        walk = PieceWalk()
        for _ in range(9):
            digest = frames.of_digest(KEY, EPOCH, walk.next(world.primary.shard))
            await link.write([digest])
        assert results(await link.answers(1)) == [BackupRefusalReason.NO_COPY]
        assert (received.num_different, world.version) == (1, 0)
        assert results(await link.request(world.primary.image())) == [2]
    await world.assert_same()


@pytest.mark.long
async def test_many_streams_that_never_end_and_never_read_take_bounded_memory() -> None:
    """Each stream begins a record of gigabytes, sends 8 MiB of it in small pieces, and reads no
    reply. Their pieces take no more than the limit."""
    limit_bytes, num_streams, sent_bytes = 16 << 20, 64, 8 << 20
    data = bytes(frames.INLINE_BYTES)
    piece = pb.FollowRequest(bytes=Piece(data=data, checksum=crc32(data)))
    start = pb.RecordStart(job=JOB, shard_id=0, epoch=EPOCH, num_bytes=frames.MAX_RECORD_BYTES)
    store = MemoryStore()
    async with (
        running(config("ps-0", memory_limit_bytes=limit_bytes), store) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):

        async def follow(number: int) -> AnyCall:
            call = ReplicationStub(channel).Follow()
            primary = pb.Holder(server_id=f"ps-{number}", incarnation="one")
            await call.write(pb.FollowRequest(hello=pb.Hello(primary=primary, link=1)))
            await call.write(pb.FollowRequest(record=start))
            for _ in range(sent_bytes // len(data)):
                await call.write(piece)
                await call.write(pb.FollowRequest(beat=pb.FollowBeat()))
            return call

        before_bytes, peak_bytes = resident_bytes(), 0
        calls = [asyncio.create_task(follow(number)) for number in range(num_streams)]
        while not all(call.done() for call in calls):
            await asyncio.wait(calls, timeout=0.05, return_when=asyncio.ALL_COMPLETED)
            held_bytes = server.replicas.received.memory.held_bytes
            peak_bytes = max(peak_bytes, resident_bytes())
            assert held_bytes <= limit_bytes
        # Without a bound: the 512 MiB that were sent. Both ends' buffers are in this process.
        assert peak_bytes - before_bytes < 24 * limit_bytes
        for call in calls:
            (await call).cancel()
    await store.close()


def resident_bytes() -> int:
    """Return the resident memory of this process, in which the server runs."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def corrupted(requests: Frames) -> Frames:
    """Return the frames with one bit of the last one flipped."""
    changed = [pb.FollowRequest.FromString(frame.SerializeToString()) for frame in requests]
    last = changed[-1].bytes
    last.data = last.data[:-1] + bytes([last.data[-1] ^ 1])
    return changed


# Each case ends with the message that must be refused.
BAD_FRAMES: dict[str, tuple[Callable[[Frames], Frames], type[ShoalError]]] = {
    "corrupted": (corrupted, ChecksumMismatch),
    "bytes twice": (lambda sent: [*sent, sent[-1]], MalformedMessage),
    "bytes of nothing": (lambda sent: sent[-1:], MalformedMessage),
    "another within it": (lambda sent: [*sent[:-1], sent[0]], MalformedMessage),
    "hello twice": (lambda sent: [pb.FollowRequest(hello=pb.Hello())], MalformedMessage),
    "nothing at all": (lambda sent: [pb.FollowRequest()], MalformedMessage),
}


@pytest.mark.sampled()
@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_record_is_not_applied(world: World, name: str) -> None:
    """The link ends with the error. The next link continues, and the copy is the same."""
    spoil, kind = BAD_FRAMES[name]
    async with Link(world) as link:
        assert results(await link.request(world.primary.image())) == [1]
        record = world.primary.frames_of(world.primary.push())
        await link.write(spoil(record))
        with pytest.raises(kind):
            await link.answers(2)
    await world.settle()
    assert world.version == (2 if name == "bytes twice" else 1)
    async with Link(world) as link:
        assert results(await link.request(record)) == [2]
    await world.assert_same()


def another_dtype(start: pb.ImageStart) -> None:
    start.cut.tensors[0].dtype = "float8"


def another_shape(start: pb.ImageStart) -> None:
    start.cut.tensors[0].shape[0] += 1


def huge_rest(start: pb.ImageStart) -> None:
    start.cut.rest_bytes = 1 << 52


def no_kind(start: pb.ImageStart) -> None:
    start.cut.kind = "cloud"


@pytest.mark.sampled()
@pytest.mark.parametrize("spoil", [another_dtype, another_shape, huge_rest, no_kind])
async def test_a_bad_image_is_refused(world: World, spoil: Callable[[pb.ImageStart], None]) -> None:
    """A good one is then accepted over the same link."""
    image = world.primary.image()
    spoil(image[0].image)
    async with Link(world) as link:
        (refused,) = results(await link.request(image))
        assert refused in (BackupRefusalReason.FAILED, BackupRefusalReason.FULL)
        assert world.version == 0
        assert results(await link.request(world.primary.image())) == [1]
    await world.assert_same()


async def test_records_are_accepted_only_in_order(world: World) -> None:
    """A record that arrives too early, or before its image, is refused; a repeated one is
    acknowledged."""
    image = world.primary.image()
    first, second, third = (world.primary.frames_of(world.primary.push()) for _ in range(3))
    no_copy = BackupRefusalReason.NO_COPY
    async with Link(world) as link:
        assert results(await link.request(first)) == [no_copy]
        assert results(await link.request(image)) == [1]
        assert results(await link.request([*second, *first, *first], 3)) == [no_copy, 2, 2]
        assert results(await link.request([*third, *second, *third], 3)) == [no_copy, 3, 4]
    await world.assert_same()


async def test_only_requests_of_the_recorded_primary_are_accepted(world: World) -> None:
    """Requests with another epoch, of a deposed primary or for another job change nothing."""
    other = BackupRefusalReason.OTHER_HOLDERS
    async with Link(world) as link:
        for image in (
            world.primary.image(EPOCH - 1),
            world.primary.image(EPOCH + 1),
            world.primary.image(job="another"),
        ):
            assert results(await link.request(image[:1])) == [other]
        assert world.version == 0
        assert results(await link.request(world.primary.image())) == [1]
        record = world.primary.push()
        assert results(await link.request(world.primary.frames_of(record, EPOCH - 1))) == [other]
        deposed = ShardAssignment(
            shard_id=0,
            epoch=EPOCH + 1,
            primary=Holder("ps-8", "one"),
            backups=(world.server.replicas.me,),
            content=Content.PRESENT,
        )
        await world.write(deposed)
        assert results(await link.request(world.primary.frames_of(record))) == [other]
        assert results(await link.request([OFFER])) == [other]


async def test_a_stream_without_a_hello_is_refused(world: World) -> None:
    """A stream must begin with the sender's identity."""
    call = world.stub.Follow()
    await call.write(OFFER)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    assert isinstance(from_rpc_error(failed.value, "ps-0"), MalformedMessage)


async def test_a_stream_for_images_needs_a_link_and_ends_with_it(world: World) -> None:
    """The end of the stream for images ends its link as well."""
    async with Link(world, images_of=7) as images:
        with pytest.raises(MalformedMessage, match="belongs to no link"):
            await images.answers(1)
    async with Link(world) as link:
        assert await link.request([OFFER]) == [BackupState(KEY, EPOCH)]
        async with Link(world, images_of=world.links) as images:
            await images.write(world.primary.image())
            assert results(await link.answers(1)) == [1]
        message = grpc.aio.EOF
        async with asyncio.timeout(ANSWER_S):
            while message is not grpc.aio.EOF:
                message = await link.call.read()
    await world.assert_same()


class Gate:
    """Replacement of a server's work, which waits for `go_on`."""

    def __init__(self, run: "Callable[[int, Callable[[], T]], object]") -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self._run = run

    async def __call__(self, num_bytes: int, work: Callable[[], T]) -> T:
        self.reached.set()
        await self.go_on.wait()
        return await self._run(num_bytes, work)  # type: ignore[misc,no-any-return]


def led_by(world: World) -> ShardAssignment:
    """Return the record after the server has taken over from its primary."""
    me = world.server.replicas.me
    return ShardAssignment(shard_id=0, epoch=EPOCH + 1, primary=me, content=Content.PRESENT)


async def led(world: World) -> ShardReplica:
    """Wait until the server leads the shard, and return its replica."""
    async with asyncio.timeout(ANSWER_S):
        await world.server.catalog.wait_for(JOB, [0], ANSWER_S)
    assert world.copy().role is ReplicaRole.PRIMARY
    return world.copy()


async def in_step(world: World, link: Link) -> None:
    """Give the server a copy, and name it as backup in the record."""
    assert results(await link.request(world.primary.image())) == [1]
    me = world.server.replicas.me
    await world.write(
        ShardAssignment(
            shard_id=0, epoch=EPOCH, primary=PRIMARY, backups=(me,), content=Content.PRESENT
        )
    )


async def test_an_image_of_a_deposed_primary_does_not_replace_the_leading_replica(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes over while it restores an image of the last primary, and acknowledges
    pushes, which stay."""
    async with Link(world) as link:
        await in_step(world, link)
        images = world.server.replicas.images
        gate = Gate(images.run)
        monkeypatch.setattr(images, "run", gate)
        await link.write(world.primary.image())
        async with asyncio.timeout(ANSWER_S):
            await gate.reached.wait()
        await world.write(led_by(world))
        replica = await led(world)
        gradient = torch.ones(NUM_ELEMENTS).numpy().tobytes()
        new = partial(DensePush, session="t", epoch=EPOCH + 1, base_version=1, lr=None)
        for sequence in (1, 2):
            assert is_dense(replica.state)
            push = new(sequence=sequence, blocks=[0], gradient=gradient)
            replica.state.push(push, lambda session: True)
        gate.go_on.set()
        assert results(await link.request([OFFER])) == [BackupRefusalReason.OTHER_HOLDERS]
    assert world.copy() is replica
    assert (replica.role, replica.epoch, replica.state.version) == (
        ReplicaRole.PRIMARY,
        EPOCH + 1,
        3,
    )
    await replica.wait_safe(3)


async def test_a_record_of_a_deposed_primary_is_not_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record waits for memory, and meanwhile the server takes over. The last primary must not
    report its push as replicated."""
    received = world.server.replicas.received
    reached, go_on = asyncio.Event(), asyncio.Event()
    await_capacity = received.await_capacity

    async def held_up() -> None:
        reached.set()
        await go_on.wait()
        await await_capacity()

    async with Link(world) as link:
        await in_step(world, link)
        monkeypatch.setattr(received, "await_capacity", held_up)
        await link.write(world.primary.frames_of(world.primary.push()))
        async with asyncio.timeout(ANSWER_S):
            await reached.wait()
        await world.write(led_by(world))
        replica = await led(world)
        go_on.set()
        assert results(await link.answers(1)) == [BackupRefusalReason.OTHER_HOLDERS]
    assert world.copy() is replica
    assert (replica.role, replica.state.version) == (ReplicaRole.PRIMARY, 1)


async def test_acknowledged_updates_are_applied_before_the_copy_leads(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary's link has ended by then."""
    received = world.server.replicas.received
    async with Link(world) as link:
        await in_step(world, link)
        gate = Gate(received.run)
        monkeypatch.setattr(received, "run", gate)
        assert results(await link.request(world.primary.frames_of(world.primary.push()))) == [2]
        async with asyncio.timeout(ANSWER_S):
            await gate.reached.wait()
        await world.write(led_by(world))
        assert world.copy().role is ReplicaRole.BACKUP
        replica = world.copy()
    gate.go_on.set()
    assert await led(world) is replica
    assert (replica.role, replica.state.version) == (ReplicaRole.PRIMARY, 2)


async def test_an_image_that_is_older_than_the_copy_is_refused(world: World) -> None:
    """The primary knows the copy's version, which a late image must not lower."""
    older = world.primary.image()
    world.primary.push()
    async with Link(world) as link:
        assert results(await link.request(world.primary.image())) == [2]
        assert results(await link.request(older)) == [BackupRefusalReason.FAILED]
    await world.assert_same()
