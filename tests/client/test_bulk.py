"""Pulls and pushes by shared memory, by sockets and by gRPC: the same bits, and the same care."""

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import closing

import grpc
import numpy as np
import pytest
from parameter_servers import ParameterServers

from shoal_client.bulk import arena as client_arena
from shoal_client.bulk import connection as client_connection
from shoal_client.bulk.connection import Connection
from shoal_client.parameters import ParameterClient
from shoal_client.piece_stub import PieceStub
from shoal_proto import bulk
from shoal_proto.bulk import HEADER_BYTES, Frame, FrameReader, Kind
from shoal_proto.checksum import crc32
from shoal_proto.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidSpec,
    MalformedMessage,
    Unavailable,
)
from shoal_proto.status import from_detail
from shoal_proto.v1.identity_pb2 import ErrorDetail, Token
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec, StalenessPolicy
from shoal_proto.v1.parameters_pb2 import (
    OpenBulkRequest,
    PullItem,
    PullRequest,
    PushHeader,
    PushItem,
    PushReply,
    PushRequest,
)
from shoal_proto.v1.shards_pb2 import ParameterSpec

DTYPES = {"weight": "float32", "bias": "float32", "wide": "float64", "half": "float16"}
SIZES = {"weight": 900_001, "bias": 70, "wide": 5_003, "half": 7_001}
SCHEMA = [ParameterSpec(name=n, shape=[SIZES[n]], dtype=DTYPES[n]) for n in SIZES]
MOMENTUM = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1, momentum=0.9)])
WAYS = {"auto": "shared-memory", "tcp": "tcp", "grpc": "grpc"}


@pytest.fixture
def servers() -> Iterator[ParameterServers]:
    with ParameterServers(2) as servers:
        yield servers


def drawn(seed: int) -> dict[str, memoryview]:
    rng = np.random.default_rng(seed)
    return {n: memoryview(rng.standard_normal(SIZES[n]).astype(DTYPES[n])).cast("B") for n in SIZES}


def zeros() -> dict[str, memoryview]:
    return {n: memoryview(np.zeros(SIZES[n], dtype=DTYPES[n])).cast("B") for n in SIZES}


def connect(
    servers: ParameterServers, transport: str, *, job: str = "job", member: str = "w0"
) -> ParameterClient:
    token = servers.admit(member, job=job)
    return ParameterClient(
        [servers.coordinator], lambda: token, timeout_s=20.0, transport=transport
    )


def trained(
    servers: ParameterServers, transport: str, optimizer: OptimizerSpec = MOMENTUM
) -> Mapping[str, bytes]:
    """The parameters after some pushes, of which one has not every gradient."""
    with closing(connect(servers, transport, job=f"job-{transport}")) as client:
        client.place(SCHEMA)
        client.create(optimizer, drawn(0))
        values = zeros()
        client.pull(values)
        for seed in range(1, 5):
            gradients = drawn(seed)
            if seed == 2:
                del gradients["bias"], gradients["half"]
            bases = None
            if optimizer.HasField("staleness"):
                bases = {name: memoryview(bytes(value)) for name, value in values.items()}
            result = client.push(gradients, into=values if seed != 3 else None, bases=bases)
            assert set(result.versions.values()) == {seed + 1}
            assert result.retries == 0
            if seed == 3:
                client.pull(values)
        assert set(client.ways.values()) == {WAYS[transport]}
        assert len(client.ways) == 2
        return {name: bytes(value) for name, value in values.items()}


def test_every_way_gives_the_same_bits(servers: ParameterServers) -> None:
    by_grpc = trained(servers, "grpc")
    assert trained(servers, "auto") == by_grpc
    assert trained(servers, "tcp") == by_grpc


def test_values_that_a_gradient_was_computed_on_follow_it(servers: ParameterServers) -> None:
    """Twice as many bytes go to a server as come back."""
    policy = StalenessPolicy(kind="compensate", strength=0.5)
    optimizer = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.1)], staleness=policy)
    by_grpc = trained(servers, "grpc", optimizer)
    assert trained(servers, "auto", optimizer) == by_grpc
    assert trained(servers, "tcp", optimizer) == by_grpc


def test_two_workers_by_different_ways(servers: ParameterServers) -> None:
    """What one pushes the other sees, whichever way either takes."""
    with (
        closing(connect(servers, "auto")) as near,
        closing(connect(servers, "tcp", member="w1")) as far,
    ):
        near.place(SCHEMA)
        near.create(MOMENTUM, zeros())
        far.fetch_map()
        far.pull(zeros())
        ones = {n: memoryview(np.ones(SIZES[n], dtype=DTYPES[n])).cast("B") for n in SIZES}
        near.push(ones)
        seen, again = zeros(), zeros()
        far.push(ones, into=seen)
        near.pull(again)
        assert seen == again
        assert np.frombuffer(seen["wide"])[0] == pytest.approx(-0.1 - 0.19)


def test_shards_too_large_for_shared_memory_go_through_the_socket(
    servers: ParameterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_arena, "MAX_ARENA_BYTES", 8192)
    with closing(connect(servers, "auto")) as client:
        client.place(SCHEMA)
        client.create(MOMENTUM, drawn(0))
        values = zeros()
        client.pull(values)
        assert values == drawn(0)
        assert set(client.ways.values()) == {"unix-socket"}


def test_a_later_call_with_larger_shards_shares_more_memory(servers: ParameterServers) -> None:
    with closing(connect(servers, "auto")) as client:
        shard_map = client.place(SCHEMA)
        client.create(MOMENTUM, drawn(0))
        values = zeros()
        client.pull(values)
        sizes = {s.shard_id: sum(b.num_elements for b in s.blocks) for s in shard_map.shards}
        smallest, largest = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        with closing(connect(servers, "auto", member="w1")) as other:
            other.fetch_map()
            ones = {n: memoryview(np.ones(SIZES[n], dtype=DTYPES[n])).cast("B") for n in SIZES}
            assert other.push(ones, only=[smallest]).versions == {smallest: 2}
            assert other.push(ones, only=[largest]).versions == {largest: 2}
            assert set(other.ways.values()) == {"shared-memory"}
            seen = zeros()
            other.pull(seen)
            client.pull(values)
            assert seen == values


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
def test_more_shards_are_refused_than_shared_memory_holds(transport: str) -> None:
    """They are refused before the client has come to send them: no place is kept for those."""
    with ParameterServers(1) as servers, closing(connect(servers, transport)) as client:
        num_elements = 3 * client_arena.NUM_PLACES * 2**18
        schema = [ParameterSpec(name="w", shape=[num_elements], dtype="float32")]
        shard_map = client.place(schema)
        assert len(shard_map.shards) > 2 * client_arena.NUM_PLACES
        values = memoryview(bytearray(4 * num_elements))
        client.create(MOMENTUM, {"w": values})
        client.pull({"w": values})
        for shard in shard_map.shards:
            shard.epoch += 7
        started_s = time.monotonic()
        result = client.push({"w": memoryview(bytes(4 * num_elements))}, into={"w": values})
        assert result.retries == 1
        assert set(result.versions.values()) == {2}
        assert time.monotonic() - started_s < 10.0


def test_a_server_without_memory_to_share_takes_the_socket() -> None:
    """More than the parameters need is not there."""
    with (
        ParameterServers(1, memory_limit_bytes=9_000_000) as servers,
        closing(connect(servers, "auto")) as client,
    ):
        client.place(SCHEMA)
        client.create(MOMENTUM, drawn(0))
        values = zeros()
        client.pull(values)
        assert values == drawn(0)
        assert set(client.ways.values()) == {"unix-socket"}


def test_an_unknown_transport_is_refused(servers: ParameterServers) -> None:
    with pytest.raises(InvalidSpec, match="carrier-pigeon"):
        connect(servers, "carrier-pigeon")


class RawConnection:
    """A connection of the bulk transport, frame by frame."""

    def __init__(
        self, servers: ParameterServers, token: Token, *, key: bytes | None = None
    ) -> None:
        with grpc.insecure_channel(servers.servers["ps-0"].address) as channel:
            offer = PieceStub(channel).OpenBulk(OpenBulkRequest(token=token), timeout=10.0)
        self._reader = FrameReader()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20.0)
        self.socket.connect(f"\0{offer.local_name}")
        self.key = offer.key if key is None else key
        self.socket.sendall(bulk.message(Kind.HELLO, self.key))

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def next(self) -> Frame | None:
        """The next frame but beats; None once the server has hung up."""
        while True:
            frame = self._reader.next()
            if frame is not None and frame.kind is not Kind.BEAT:
                return frame
            if frame is None:
                count = self.socket.recv_into(self._reader.space())
                if not count:
                    return None
                self._reader.received(count)

    def error(self) -> Exception:
        frame = self.next()
        assert frame is not None
        assert frame.kind is Kind.ERROR
        return from_detail(ErrorDetail.FromString(bytes(frame.body)))


@pytest.fixture
def small() -> Iterator[tuple[ParameterServers, ParameterClient, Token]]:
    """A server with one shard of 100 numbers, all zero."""
    with ParameterServers(1) as servers:
        token = servers.admit("w0")
        with closing(ParameterClient([servers.coordinator], lambda: token)) as client:
            client.place([ParameterSpec(name="w", shape=[100], dtype="float32")])
            sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
            client.create(sgd, {"w": memoryview(bytes(400))})
            yield servers, client, token


def opened(small: tuple[ParameterServers, ParameterClient, Token]) -> RawConnection:
    raw = RawConnection(small[0], small[2])
    answer = raw.next()
    assert answer is not None
    assert answer.kind is Kind.HELLO
    return raw


def opening(token: Token, sequence: int = 1) -> bytes:
    header = PushHeader(
        token=token,
        sequence=sequence,
        shards=[PushItem(shard_id=0, epoch=1, base_version=1)],
        all_shard_ids=[0],
    )
    return bulk.message(Kind.PUSH, PushRequest(header=header).SerializeToString())


def piece(checksum: int | None = None) -> bytes:
    body = struct.pack("<100f", *[-1.0] * 100)
    checksum = crc32(body) if checksum is None else checksum
    return bulk.header(Kind.PIECE, num_bytes=400, checksum=checksum) + body


def value_of(client: ParameterClient) -> float:
    values = memoryview(bytearray(400))
    client.pull({"w": values})
    (first,) = set(values.cast("f"))
    assert isinstance(first, float)
    return first


Small = tuple[ParameterServers, ParameterClient, Token]


def test_a_push_frame_by_frame(small: Small) -> None:
    """The one way in which it is done right: what the next tests do wrong is refused for that."""
    raw = opened(small)
    raw.send(opening(small[2]), piece(), bulk.header(Kind.END))
    reply, end = raw.next(), raw.next()
    assert reply is not None
    assert PushReply.FromString(bytes(reply.body)).outcome.version == 2
    assert end is not None
    assert end.kind is Kind.END
    assert value_of(small[1]) == 1.0


@pytest.mark.parametrize("is_spent", [False, True])
def test_only_a_key_that_was_given_opens_a_connection_and_only_once(
    small: Small, *, is_spent: bool
) -> None:
    key = opened(small).key if is_spent else bytes(32)
    raw = RawConnection(small[0], small[2], key=key)
    assert raw.next() is None


def test_who_is_no_member_gets_no_key(small: Small) -> None:
    stranger = Token(job="job", generation=1, member_id="w9", incarnation="none")
    with pytest.raises(grpc.RpcError, match="w9"):
        RawConnection(small[0], stranger)


def test_a_gradient_that_changed_on_the_way_is_refused(small: Small) -> None:
    raw = opened(small)
    raw.send(opening(small[2]), piece(checksum=7), bulk.header(Kind.END))
    reply = raw.next()
    assert reply is not None
    outcome = PushReply.FromString(bytes(reply.body)).outcome
    assert isinstance(from_detail(outcome.error), ChecksumMismatch)
    assert value_of(small[1]) == 0.0


@pytest.mark.parametrize("cut_bytes", [1, 200, HEADER_BYTES + 399])
def test_a_push_that_is_cut_off_changes_nothing(small: Small, cut_bytes: int) -> None:
    raw = opened(small)
    raw.send(opening(small[2]), piece()[:cut_bytes])
    raw.socket.shutdown(socket.SHUT_WR)
    frame = raw.next()
    while frame is not None:
        assert frame.kind is not Kind.MESSAGE
        frame = raw.next()
    assert value_of(small[1]) == 0.0


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (bulk.header(Kind.PLACED, num_bytes=400), "shared memory"),
        (bulk.header(Kind.BEAT), "does not belong"),
    ],
)
def test_frames_that_no_client_sends_end_the_call(small: Small, frame: bytes, words: str) -> None:
    raw = opened(small)
    raw.send(opening(small[2]), frame)
    error = raw.error()
    assert isinstance(error, MalformedMessage)
    assert words in str(error)
    assert raw.next() is None
    assert value_of(small[1]) == 0.0


def test_a_member_may_not_pass_for_a_server(small: Small) -> None:
    raw = opened(small)
    raw.send(bulk.header(Kind.FOLLOW))
    assert isinstance(raw.error(), MalformedMessage)


def test_a_push_that_does_not_parse_is_refused(small: Small) -> None:
    raw = opened(small)
    raw.send(bulk.message(Kind.PUSH, b"\xff\xff"))
    assert "does not parse" in str(raw.error())


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    """A client's connection, and the other end of it."""
    near, far = socket.socketpair()
    with far, closing(Connection(near, "server", None)) as connection:
        yield connection, far


Ends = tuple[Connection, socket.socket]
PULL = PullRequest(shards=[PullItem(shard_id=0, epoch=1)])


def test_a_server_that_says_nothing_is_given_up(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped, or whose machine has lost its network: nothing breaks the socket."""
    monkeypatch.setattr(client_connection, "SILENCE_S", 0.2)
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="nothing for"):
        list(ends[0].pull(PULL, [], 60.0))
    assert time.monotonic() - started_s < 10.0
    assert not ends[0].is_usable


def test_a_server_that_is_slow_but_there_is_waited_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the time of the call is over."""
    monkeypatch.setattr(client_connection, "SILENCE_S", 0.3)
    answers = ends[0].pull(PULL, [], 1.0)
    ends[1].sendall(bulk.header(Kind.BEAT))
    monkeypatch.setattr(client_connection, "SILENCE_S", 30.0)
    with pytest.raises(DeadlineExceeded):
        list(answers)


def test_a_server_that_hangs_up_is_told_from_one_that_is_done(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(Unavailable, match="server"):
        list(ends[0].pull(PULL, [], 60.0))


def test_a_call_that_its_caller_leaves_ends_the_connection(ends: Ends) -> None:
    """What is still on its way must not be taken for the answer to the next call."""
    version = bulk.message(Kind.MESSAGE, b"\x0a\x06\x08\x00\x10\x01\x18\x08")
    ends[1].sendall(version)
    answers = ends[0].pull(PULL, [], 60.0)
    assert next(answers) is not None
    answers.close()  # type: ignore[attr-defined]
    assert not ends[0].is_usable


def test_close_ends_a_call_under_way(ends: Ends) -> None:
    answers = ends[0].pull(PULL, [], 60.0)
    ends[1].sendall(bulk.message(Kind.MESSAGE, b"\x0a\x06\x08\x00\x10\x01\x18\x08"))
    assert next(answers) is not None
    ends[0].close()
    with pytest.raises(Unavailable):
        next(answers)
