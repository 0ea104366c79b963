"""The Parameters service over gRPC: valid and invalid requests."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest
import torch
from support.clusters.assignment_records import write_assignments
from support.clusters.memory_store import MemoryStore
from support.clusters.parameter_servers import config

from shoal_proto import MAX_MESSAGE_BYTES, MAX_PIECE_BYTES
from shoal_proto.errors import (
    ChecksumMismatch,
    DtypeMismatch,
    Fenced,
    InvalidSpec,
    MalformedMessage,
    NonFiniteGradient,
    Overloaded,
    ShapeMismatch,
    ShardNotReady,
    ShoalError,
    UnknownShard,
    UnsupportedOptimizer,
    WrongEpoch,
)
from shoal_proto.incarnation import public_id
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    CreateHeader,
    CreateReply,
    CreateRequest,
    DescribeRequest,
    DropRequest,
    HyperParameters,
    OptimizerSpec,
    Piece,
    PullItem,
    PullRequest,
    PushHeader,
    PushItem,
    PushOutcome,
    PushRequest,
)
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.shards_pb2 import Block, Shard, ShardMap
from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.records import shard_map
from shoal_server.parameters.config import WorkLimits
from shoal_server.parameters.process import RunningServer, running

JOB = "job"
TOKEN = Token(job=JOB, generation=1, member_id="w0", incarnation="one")
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
SMALL, LARGE, HUGE = 0, 1, 2
NUM_ELEMENTS = {SMALL: 100, LARGE: 3_000_000, HUGE: 16 * 1024 * 1024}


def a_shard(shard_id: int, **changes: object) -> Shard:
    step = MAX_PIECE_BYTES // 4
    size = NUM_ELEMENTS[shard_id]
    blocks = [
        Block(parameter=f"p{shard_id}", offset=i, num_elements=min(step, size - i))
        for i in range(0, size, step)
    ]
    fields = {"shard_id": shard_id, "server_id": "ps-0", "epoch": 1, "dtype": "float32"}
    return Shard(**(fields | {"blocks": blocks} | changes))  # type: ignore[arg-type]


@dataclass(kw_only=True)
class World:
    store: MemoryStore
    stub: ParametersStub
    channel: grpc.aio.Channel
    server: RunningServer


@pytest.fixture
async def world() -> AsyncIterator[World]:
    store = MemoryStore()
    shards = [a_shard(i) for i in NUM_ELEMENTS]
    elsewhere = Shard(shard_id=5, server_id="ps-9", epoch=1, dtype="float32")
    layout = shard_map.stored(ShardMap(job=JOB, shards=[*shards, elsewhere]))
    await shard_map.write_chunks(store, layout)
    await store.put(layout.head.key, layout.head.value)
    await store.put(keys.member(JOB, "w0"), json.dumps({"incarnation": "one"}).encode())
    limits = (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", 64 * 1024 * 1024),
    )
    limited = WorkLimits(max_unfinished_bytes=80 * 1024 * 1024)
    async with (
        running(config("ps-0", work=limited), store) as server,
        grpc.aio.insecure_channel(server.address, options=limits) as channel,
    ):
        replica = [
            ShardAssignment(shard_id=i, epoch=1, primary=server.replicas.me) for i in NUM_ELEMENTS
        ]
        replica.append(ShardAssignment(shard_id=5, epoch=1, primary=Holder("ps-9", "nine")))
        await write_assignments(store, JobAssignments(job=JOB, copies=2, shards=tuple(replica)))
        yield World(store=store, stub=ParametersStub(channel), channel=channel, server=server)
    await store.close()


def pieces(shard_id: int, data: bytes, size: int = 1 << 20) -> Iterator[Piece]:
    for start in range(0, len(data), size):
        part = data[start : start + size]
        yield Piece(shard_id=shard_id, offset_bytes=start, data=part, checksum=zlib.crc32(part))


def full(shard_id: int, value: float) -> bytes:
    return torch.full((NUM_ELEMENTS[shard_id],), value).numpy().tobytes()


async def create(
    world: World,
    *shard_ids: int,
    optimizer: OptimizerSpec = SGD,
    shards: Sequence[Shard] | None = None,
    hold: bool = False,
) -> CreateReply:
    """Create shards of zeros. `hold`: keep the stream open, for a call that will be refused:
    grpc.aio loses the server's status if the stream ends first."""

    async def requests() -> AsyncIterator[CreateRequest]:
        wanted = [a_shard(i) for i in shard_ids] if shards is None else shards
        yield CreateRequest(header=CreateHeader(token=TOKEN, optimizer=optimizer, shards=wanted))
        for i in shard_ids:
            for piece in pieces(i, full(i, 0.0), MAX_PIECE_BYTES):
                yield CreateRequest(piece=piece)
        if hold:
            await asyncio.Event().wait()

    try:
        reply: CreateReply = await world.stub.Create(requests())
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "ps-0") from None
    return reply


def header(*shard_ids: int, **changes: object) -> PushHeader:
    items = [PushItem(shard_id=i, epoch=1, base_version=1) for i in shard_ids]
    return PushHeader(**({"token": TOKEN, "sequence": 1, "shards": items} | changes))  # type: ignore[arg-type]


async def push(
    world: World, opening: PushHeader, parts: Sequence[Piece], *, hold: bool = False
) -> tuple[dict[int, PushOutcome], dict[int, bytes]]:
    """Return outcomes and returned values by shard. `hold` as in `create`."""

    async def requests() -> AsyncIterator[PushRequest]:
        yield PushRequest(header=opening)
        for piece in parts:
            yield PushRequest(piece=piece)
        if hold:
            await asyncio.Event().wait()

    outcomes: dict[int, PushOutcome] = {}
    values: dict[int, bytes] = {}
    try:
        async for reply in world.stub.Push(requests()):
            outcomes |= {outcome.shard_id: outcome for outcome in reply.outcomes}
            if reply.HasField("piece"):
                replica = values.get(reply.piece.shard_id, b"")
                assert reply.piece.offset_bytes == len(replica)
                assert reply.piece.checksum == zlib.crc32(reply.piece.data)
                values[reply.piece.shard_id] = replica + reply.piece.data
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "ps-0") from None
    return outcomes, values


async def pull(world: World, shard_id: int, **changes: object) -> tuple[int, bytes]:
    fields = {"shard_id": shard_id, "epoch": 1} | changes
    request = PullRequest(token=TOKEN, shards=[PullItem(**fields)])  # type: ignore[arg-type]
    version, data = 0, b""
    try:
        async for reply in world.stub.Pull(request):
            if reply.HasField("version"):
                version = reply.version.version
            data += reply.piece.data
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, "ps-0") from None
    return version, data


def error_of(outcome: PushOutcome) -> ShoalError:
    assert outcome.HasField("error")
    return from_detail(outcome.error)


@pytest.mark.long
async def test_a_shard_of_64_mib_can_be_created_pushed_and_pulled(world: World) -> None:
    """The shard is larger than a message may be, in either direction."""
    await create(world, HUGE)
    parts = list(pieces(HUGE, full(HUGE, -1.0), MAX_PIECE_BYTES))
    outcomes, values = await push(world, header(HUGE, return_values=True), parts)
    assert outcomes[HUGE].version == 2
    assert values[HUGE] == full(HUGE, 1.0)
    assert await pull(world, HUGE) == (2, values[HUGE])


async def test_a_repeated_push_is_marked_as_a_duplicate(world: World) -> None:
    """A repeated push gets its first outcome, and is not applied again."""
    await create(world, SMALL)
    parts = list(pieces(SMALL, full(SMALL, -1.0)))
    first, _ = await push(world, header(SMALL), parts)
    again, values = await push(world, header(SMALL, return_values=True), parts)
    assert (first[SMALL].duplicate, again[SMALL].duplicate) == (False, True)
    assert again[SMALL].version == first[SMALL].version == 2
    assert values[SMALL] == full(SMALL, 1.0)


async def test_a_bad_part_of_a_push_does_not_affect_others(world: World) -> None:
    """The error is answered for its shard; the other part is applied."""
    await create(world, SMALL, LARGE)
    parts = [
        *pieces(SMALL, full(SMALL, float("inf"))),
        *pieces(LARGE, full(LARGE, -1.0)),
    ]
    outcomes, values = await push(world, header(SMALL, LARGE, return_values=True), parts)
    error = error_of(outcomes[SMALL])
    assert isinstance(error, NonFiniteGradient)
    assert error.details == {"parameter": "p0"}
    assert values == {LARGE: full(LARGE, 1.0)}
    assert await pull(world, SMALL) == (1, full(SMALL, 0.0))


def corrupted(shard_id: int) -> list[Piece]:
    parts = list(pieces(shard_id, full(shard_id, -1.0)))
    parts[-1].data = parts[-1].data[:-1] + b"\x01"
    return parts


def infinities() -> bytes:
    """Return a gradient with two infinities of opposite signs."""
    values = torch.zeros(NUM_ELEMENTS[LARGE])
    values[3], values[-3] = float("inf"), -float("inf")
    return values.numpy().tobytes()


BAD_PUSHES = {
    "truncated": (list(pieces(LARGE, full(LARGE, -1.0)))[:-1], ShapeMismatch),
    "nothing": ([], ShapeMismatch),
    "too long": ([*pieces(LARGE, full(LARGE, -1.0) + bytes(4))], ShapeMismatch),
    "float64": ([*pieces(LARGE, full(LARGE, -1.0) * 2)], ShapeMismatch),
    "float16": ([*pieces(LARGE, full(LARGE, -1.0)[: 2 * NUM_ELEMENTS[LARGE]])], ShapeMismatch),
    "corrupted": (corrupted(LARGE), ChecksumMismatch),
    "out of order": (list(pieces(LARGE, full(LARGE, -1.0)))[::-1], MalformedMessage),
    "infinite": ([*pieces(LARGE, full(LARGE, float("inf")))], NonFiniteGradient),
    "infinite, and minus that": (list(pieces(LARGE, infinities())), NonFiniteGradient),
    "not a number": ([*pieces(LARGE, full(LARGE, float("nan")))], NonFiniteGradient),
}


@pytest.mark.sampled()
@pytest.mark.parametrize("name", BAD_PUSHES)
async def test_a_bad_part_is_not_applied(world: World, name: str) -> None:
    """A part that is truncated, too long, corrupted, out of order or not finite changes nothing."""
    await create(world, LARGE)
    parts, kind = BAD_PUSHES[name]
    outcomes, values = await push(world, header(LARGE, return_values=True), parts)
    assert isinstance(error_of(outcomes[LARGE]), kind)
    assert values == {}
    assert await pull(world, LARGE) == (1, full(LARGE, 0.0))


async def test_missing_and_misplaced_shards_have_different_errors(world: World) -> None:
    """The shard is unknown, not created yet, on another server, or has another epoch."""
    await create(world, SMALL)
    wrong_epoch = header()
    wrong_epoch.shards.add(shard_id=SMALL, epoch=2, base_version=1)
    for shard_id in (LARGE, 5, 99):
        wrong_epoch.shards.add(shard_id=shard_id, epoch=1)
    parts = list(pieces(SMALL, full(SMALL, 1.0)))
    outcomes, _ = await push(world, wrong_epoch, parts)
    kinds = {shard_id: type(error_of(outcome)) for shard_id, outcome in outcomes.items()}
    assert kinds == {SMALL: WrongEpoch, LARGE: ShardNotReady, 5: WrongEpoch, 99: UnknownShard}
    assert "saw 2; expected 1" in str(error_of(outcomes[SMALL]))
    assert "ps-9" in str(error_of(outcomes[5]))
    with pytest.raises(WrongEpoch):
        await pull(world, SMALL, epoch=7)
    with pytest.raises(UnknownShard, match="no shard 99"):
        await pull(world, 99)
    assert await pull(world, SMALL) == (1, full(SMALL, 0.0))


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("opening", "kind"),
    [
        (header(SMALL, sequence=0), MalformedMessage),
        (header(SMALL, SMALL), MalformedMessage),
        (header(SMALL, lr=[float("nan")]), InvalidSpec),
        (header(SMALL, lr=[-1.0]), InvalidSpec),
        (header(SMALL, lr=[1e39]), InvalidSpec),
        (header(LARGE), MalformedMessage),
        (header(SMALL, token=Token(job=JOB, member_id="w0", incarnation="zero")), Fenced),
        (header(SMALL, token=Token(job=JOB, member_id="w1", incarnation="one")), Fenced),
        (
            header(SMALL, token=Token(job="../x", member_id="w0", incarnation="one")),
            MalformedMessage,
        ),
        (header(SMALL, token=Token()), MalformedMessage),
    ],
)
async def test_a_bad_header_refuses_the_whole_push(
    world: World, opening: PushHeader, kind: type[ShoalError]
) -> None:
    """No part is applied."""
    await create(world, SMALL, LARGE)
    misplaced = list(pieces(SMALL, full(SMALL, -1.0))) if opening == header(LARGE) else []
    with pytest.raises(kind):
        await push(world, opening, misplaced, hold=True)
    assert await pull(world, SMALL) == (1, full(SMALL, 0.0))


async def test_a_replaced_member_is_fenced_at_once(world: World) -> None:
    """The key of the member in etcd has a new incarnation, which is accepted."""
    await create(world, SMALL)
    parts = list(pieces(SMALL, full(SMALL, -1.0)))
    await world.store.put(keys.job_state(JOB), json.dumps({"last_generation": 8}).encode())
    await world.store.put(keys.member(JOB, "w0"), json.dumps({"incarnation": "two"}).encode())
    successor = Token(job=JOB, member_id="w0", incarnation="two")
    await push(world, header(SMALL, token=successor), parts)
    with pytest.raises(Fenced, match=f"process {public_id('one')}") as fenced:
        await push(world, header(SMALL), [], hold=True)
    assert fenced.value.details == {"generation": "8"}


async def test_a_member_that_is_replaced_during_its_push_changes_no_more(world: World) -> None:
    """The member's key in etcd changes when one shard is applied and half of the other has come."""
    await create(world, SMALL, LARGE)
    first, second = (list(pieces(i, full(i, -1.0))) for i in (SMALL, LARGE))
    is_gone = asyncio.Event()

    async def requests() -> AsyncIterator[PushRequest]:
        yield PushRequest(header=header(SMALL, LARGE))
        for piece in (*first, *second[:6]):
            yield PushRequest(piece=piece)
        await is_gone.wait()
        for piece in second[6:]:
            yield PushRequest(piece=piece)

    outcomes: dict[int, PushOutcome] = {}
    async for reply in world.stub.Push(requests()):
        outcomes |= {outcome.shard_id: outcome for outcome in reply.outcomes}
        if not is_gone.is_set():
            record = json.dumps({"incarnation": "two"}).encode()
            await world.store.put(keys.member(JOB, "w0"), record)
            # The server reads the record at once, as the watch may be later.
            await world.server.fence.check(Token(job=JOB, member_id="w0", incarnation="two"))
            is_gone.set()
    assert outcomes[SMALL].version == 2
    assert isinstance(error_of(outcomes[LARGE]), Fenced)
    described = await world.stub.Describe(DescribeRequest(job=JOB))
    assert {shard.shard_id: shard.version for shard in described.shards} == {SMALL: 2, LARGE: 1}


@pytest.mark.parametrize("method", ["Create", "Push", "Pull", "Describe", "Drop"])
async def test_bytes_that_are_no_message_are_refused(world: World, method: str) -> None:
    """The error names the expected type, and the server serves on."""
    await create(world, SMALL)
    path, garbage = f"/shoal.v1.Parameters/{method}", b"\xff\xff\xff garbage"

    async def stream() -> AsyncIterator[bytes]:
        yield garbage
        await asyncio.Event().wait()

    with pytest.raises(grpc.aio.AioRpcError) as failed:
        if method == "Create":
            await world.channel.stream_unary(path)(stream())
        elif method == "Push":
            async for _ in world.channel.stream_stream(path)(stream()):
                pass
        elif method == "Pull":
            async for _ in world.channel.unary_stream(path)(garbage):
                pass
        else:
            await world.channel.unary_unary(path)(garbage)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(failed.value, "ps-0")
    assert isinstance(error, MalformedMessage)
    assert f"{method}Request" in error.expected
    assert (await pull(world, SMALL))[0] == 1


@pytest.mark.long
async def test_a_message_beyond_the_limit_ends_only_its_call(world: World) -> None:
    """The server serves on."""
    await create(world, HUGE)
    parts = list(pieces(HUGE, full(HUGE, -1.0), 16 * 1024 * 1024))
    with pytest.raises(ShoalError):
        await push(world, header(HUGE), parts)
    assert (await pull(world, HUGE))[0] == 1


async def test_bad_creations_are_refused(world: World) -> None:
    """A shard must be as in the job's map, with a known optimizer and all its values."""
    small = [a_shard(SMALL)]
    lion = OptimizerSpec(kind="lion", groups=SGD.groups)
    with pytest.raises(UnsupportedOptimizer, match="lion"):
        await create(world, shards=small, optimizer=lion, hold=True)
    with pytest.raises(InvalidSpec, match="0 groups"):
        await create(world, shards=small, optimizer=OptimizerSpec(kind="sgd"), hold=True)
    for changes, kind in (
        ({"epoch": 4}, WrongEpoch),
        ({"dtype": "float16"}, DtypeMismatch),
        ({"blocks": [Block(parameter="p0", num_elements=99)]}, ShapeMismatch),
    ):
        with pytest.raises(kind):
            await create(world, shards=[a_shard(SMALL, **changes)], hold=True)
    unknown = Shard(shard_id=77, server_id="ps-0", epoch=1, dtype="float32")
    with pytest.raises(UnknownShard):
        await create(world, shards=[unknown], hold=True)
    with pytest.raises(MalformedMessage, match="unexpected piece"):
        await create(world, SMALL, shards=[a_shard(LARGE)], hold=True)
    with pytest.raises(ShapeMismatch, match="ended within shard 1"):
        await create(world, SMALL, shards=[a_shard(SMALL), a_shard(LARGE)])
    assert list((await create(world, SMALL, LARGE)).created) == [LARGE]


@pytest.mark.long
async def test_the_bytes_of_unfinished_pushes_are_bounded(world: World) -> None:
    """A push beyond the bound is refused as Overloaded, and accepted later."""
    await create(world, SMALL, HUGE)
    release, replica = asyncio.Event(), asyncio.Event()
    parts = list(pieces(HUGE, full(HUGE, -1.0)))

    async def slow() -> AsyncIterator[PushRequest]:
        yield PushRequest(header=header(SMALL, HUGE))
        for piece in (*pieces(SMALL, full(SMALL, -1.0)), parts[0]):
            yield PushRequest(piece=piece)
        await release.wait()
        for piece in parts[1:]:
            yield PushRequest(piece=piece)

    async def slowly() -> dict[int, PushOutcome]:
        outcomes = {}
        async for reply in world.stub.Push(slow()):
            outcomes |= {outcome.shard_id: outcome for outcome in reply.outcomes}
            # The small shard is answered once the first piece of the huge one was received.
            replica.set()
        return outcomes

    task = asyncio.create_task(slowly())
    await replica.wait()
    outcomes, _ = await push(world, header(HUGE, sequence=2), parts)
    assert isinstance(error_of(outcomes[HUGE]), Overloaded)
    release.set()
    assert not (await task)[HUGE].HasField("error")
    outcomes, _ = await push(world, header(HUGE, sequence=2), parts)
    assert outcomes[HUGE].version == 3


@pytest.mark.long
async def test_a_pull_has_the_values_of_one_version(world: World) -> None:
    """Each pull returns all values of one version while pushes continue."""
    await create(world, LARGE)
    done = asyncio.Event()

    async def pusher(member: str) -> None:
        value = json.dumps({"incarnation": "one"}).encode()
        await world.store.put(keys.member(JOB, member), value)
        token = Token(job=JOB, member_id=member, incarnation="one")
        parts = list(pieces(LARGE, full(LARGE, -1.0)))
        for sequence in range(1, 6):
            await push(world, header(LARGE, token=token, sequence=sequence), parts)

    async def puller() -> int:
        seen = 0
        while not done.is_set():
            version, data = await pull(world, LARGE)
            assert data == full(LARGE, float(version - 1))
            seen += 1
        return seen

    pulls = asyncio.create_task(puller())
    await asyncio.gather(pusher("a"), pusher("b"))
    done.set()
    assert await pulls > 0
    assert await pull(world, LARGE) == (11, full(LARGE, 10.0))


async def test_a_dropped_job_leaves_no_shards(world: World) -> None:
    """A member of the job can drop its shards, and no other caller can. The description before that
    has the shards' versions, staleness and memory."""
    await create(world, SMALL, LARGE)
    await push(world, header(SMALL), list(pieces(SMALL, full(SMALL, -1.0))))
    described = await world.stub.Describe(DescribeRequest(job=JOB))
    assert described.server_id == "ps-0"
    assert described.memory_bytes == 4 * (NUM_ELEMENTS[SMALL] + NUM_ELEMENTS[LARGE])
    small = described.shards[0]
    assert (small.shard_id, small.version, small.pushes, small.staleness_counts[0]) == (0, 2, 1, 1)
    stranger = Token(job=JOB, generation=1, member_id="w0", incarnation="zero")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await world.stub.Drop(DropRequest(token=stranger))
    assert isinstance(from_rpc_error(failed.value, "ps-0"), Fenced)
    assert len((await world.stub.Describe(DescribeRequest())).shards) == 2
    await world.stub.Drop(DropRequest(token=TOKEN))
    assert not (await world.stub.Describe(DescribeRequest())).shards
    with pytest.raises(ShardNotReady):
        await pull(world, SMALL, epoch=2)


async def test_values_of_a_known_version_are_not_sent(world: World) -> None:
    """The pull returns only the version."""
    await create(world, SMALL)
    assert await pull(world, SMALL, known_version=1) == (1, b"")


async def test_the_shards_of_a_finished_job_are_dropped(world: World) -> None:
    """Shards are dropped once their job is finished and its last member gone. A job that only lost
    its members keeps them."""

    async def num_shards() -> int:
        return len((await world.stub.Describe(DescribeRequest())).shards)

    async def lose(*, finished: bool) -> None:
        await world.store.put(keys.job_state(JOB), json.dumps({"finished": finished}).encode())
        await world.store.delete(keys.member(JOB, "w0"))

    await create(world, SMALL)
    await lose(finished=False)
    await world.store.put(keys.member(JOB, "w0"), json.dumps({"incarnation": "one"}).encode())
    assert await pull(world, SMALL) == (1, full(SMALL, 0.0))
    await lose(finished=True)
    async with asyncio.timeout(10):
        while await num_shards():
            pass
