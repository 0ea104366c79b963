"""Bulk connections: a server that gets bad frames, and a client whose server fails."""

import math
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import grpc
import pytest
from support.clusters.bulk_frames import RawConnection, bulk_offer
from support.clusters.parameter_servers import ParameterServers

from shoal_client.bulk import connection as client_connection
from shoal_client.bulk.connection import BulkConnection
from shoal_client.parameters.dense import ParameterClient
from shoal_proto import MAX_PIECE_BYTES, bulk
from shoal_proto.bulk import HEADER_BYTES, FrameKind
from shoal_proto.checksum import crc32
from shoal_proto.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    InvalidSpec,
    MalformedMessage,
    Unavailable,
)
from shoal_proto.pieces import Buffer
from shoal_proto.status import from_detail, to_detail
from shoal_proto.v1.identity_pb2 import ErrorDetail, Token
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.parameters_pb2 import (
    PullItem,
    PullRequest,
    PushHeader,
    PushItem,
    PushReply,
    PushRequest,
)
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.parameters.bulk.wire import FrameConnection
from shoal_server.parameters.service.bulk_listener import HELLO_S


@pytest.fixture
def small() -> Iterator[tuple[ParameterServers, ParameterClient, Token]]:
    """Start a server with one shard of 100 numbers, all zero."""
    with ParameterServers(1) as servers:
        token = servers.admit("w0")
        with closing(ParameterClient([servers.coordinator], lambda: token)) as client:
            client.place([ParameterSpec(name="w", shape=[100], dtype="float32")])
            sgd = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=1.0)])
            client.create(sgd, {"w": memoryview(bytes(400))})
            yield servers, client, token


def opened(small: tuple[ParameterServers, ParameterClient, Token]) -> RawConnection:
    return RawConnection.admitted(bulk_offer(small[0], small[2]))


def opening(token: Token, sequence: int = 1, epoch: int = 1) -> bytes:
    header = PushHeader(
        token=token,
        sequence=sequence,
        shards=[PushItem(shard_id=0, epoch=epoch, base_version=1)],
        all_shard_ids=[0],
    )
    return bulk.message(FrameKind.PUSH, PushRequest(header=header).SerializeToString())


def piece(checksum: int | None = None) -> bytes:
    body = struct.pack("<100f", *[-1.0] * 100)
    checksum = crc32(body) if checksum is None else checksum
    return bulk.header(FrameKind.PIECE, num_bytes=400, checksum=checksum) + body


def value_of(client: ParameterClient) -> float:
    values = memoryview(bytearray(400))
    client.pull({"w": values})
    (first,) = set(values.cast("f"))
    assert isinstance(first, float)
    return first


Small = tuple[ParameterServers, ParameterClient, Token]


def test_a_push_of_correct_frames_is_applied(small: Small) -> None:
    """The next tests each add a fault to these frames."""
    raw = opened(small)
    raw.send(opening(small[2]), piece(), bulk.header(FrameKind.END))
    reply, end = raw.next(), raw.next()
    assert reply is not None
    assert [o.version for o in PushReply.FromString(bytes(reply.body)).outcomes] == [2]
    assert end is not None
    assert end.kind is FrameKind.END
    assert value_of(small[1]) == 1.0


def test_the_end_of_a_push_is_sent_with_its_last_answer(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has ended the push by then; otherwise the end follows the client's
    end. A call has one end."""
    sent: list[tuple[Buffer, ...]] = []
    send = FrameConnection.send

    async def noted(self: FrameConnection, *parts: Buffer) -> None:
        sent.append(parts)
        await send(self, *parts)

    raw = opened(small)
    monkeypatch.setattr(FrameConnection, "send", noted)
    end = bulk.header(FrameKind.END)
    raw.send(opening(small[2], 1), piece(), end)
    assert [frame.kind for frame in (raw.next(), raw.next()) if frame] == [
        FrameKind.MESSAGE,
        FrameKind.END,
    ]
    assert [parts[-1] == end for parts in sent] == [True]
    # The push is refused at its opening: the answer comes before the client's end.
    raw.send(opening(small[2], 2, epoch=9))
    answer = raw.next()
    raw.send(piece(), end)
    assert [frame.kind for frame in (answer, raw.next()) if frame] == [
        FrameKind.MESSAGE,
        FrameKind.END,
    ]
    raw.send(opening(small[2], 3), piece(), end)
    assert [frame.kind for frame in (raw.next(), raw.next()) if frame] == [
        FrameKind.MESSAGE,
        FrameKind.END,
    ]
    assert value_of(small[1]) == 2.0


@pytest.mark.parametrize("is_spent", [False, True])
def test_a_connection_needs_an_unused_key_of_the_server(small: Small, *, is_spent: bool) -> None:
    key = opened(small).key if is_spent else bytes(32)
    raw = RawConnection(bulk_offer(small[0], small[2]), key=key)
    assert raw.next() is None


@pytest.mark.parametrize("kind", [FrameKind.MESSAGE, FrameKind.PIECE])
def test_data_announced_without_a_key_is_not_waited_for(small: Small, kind: FrameKind) -> None:
    """A header of 40 bytes may announce megabytes, for which the server would reserve memory."""
    raw = RawConnection(
        bulk_offer(small[0], small[2]), greeting=bulk.header(kind, num_bytes=MAX_PIECE_BYTES)
    )
    raw.socket.settimeout(HELLO_S / 2)
    assert raw.next() is None


def test_only_a_member_gets_a_key(small: Small) -> None:
    stranger = Token(job="job", generation=1, member_id="w9", incarnation="none")
    with pytest.raises(grpc.RpcError, match="w9"):
        bulk_offer(small[0], stranger)


def test_a_corrupted_gradient_is_refused(small: Small) -> None:
    raw = opened(small)
    raw.send(opening(small[2]), piece(checksum=7), bulk.header(FrameKind.END))
    reply = raw.next()
    assert reply is not None
    (outcome,) = PushReply.FromString(bytes(reply.body)).outcomes
    assert isinstance(from_detail(outcome.error), ChecksumMismatch)
    assert value_of(small[1]) == 0.0


@pytest.mark.parametrize(
    ("header", "field"),
    [
        (PushHeader(sequence=1, lr=[math.nan]), "PushHeader.lr"),
        (PushHeader(sequence=2**60), "PushHeader.sequence"),
    ],
)
def test_a_header_has_the_same_bounds_as_over_grpc(
    small: Small, header: PushHeader, field: str
) -> None:
    raw = opened(small)
    header.token.CopyFrom(small[2])
    raw.send(bulk.message(FrameKind.PUSH, PushRequest(header=header).SerializeToString()))
    reply = raw.next()
    assert reply is not None and reply.kind is FrameKind.ERROR
    error = from_detail(ErrorDetail.FromString(bytes(reply.body)))
    assert isinstance(error, InvalidSpec) and error.details == {"field": field}


@pytest.mark.parametrize("cut_bytes", [1, 200, HEADER_BYTES + 399])
def test_a_push_that_is_cut_off_changes_nothing(small: Small, cut_bytes: int) -> None:
    raw = opened(small)
    raw.send(opening(small[2]), piece()[:cut_bytes])
    raw.socket.shutdown(socket.SHUT_WR)
    frame = raw.next()
    while frame is not None:
        assert frame.kind is not FrameKind.MESSAGE
        frame = raw.next()
    assert value_of(small[1]) == 0.0


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (bulk.header(FrameKind.PLACED, num_bytes=400), "shared memory"),
        (bulk.header(FrameKind.BEAT), "does not belong"),
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


def test_a_members_connection_cannot_replicate(small: Small) -> None:
    raw = opened(small)
    raw.send(bulk.header(FrameKind.FOLLOW))
    assert isinstance(raw.error(), MalformedMessage)


def test_a_push_that_does_not_parse_is_refused(small: Small) -> None:
    raw = opened(small)
    raw.send(bulk.message(FrameKind.PUSH, b"\xff\xff"))
    assert "does not parse" in str(raw.error())


@pytest.fixture
def ends() -> Iterator[tuple[BulkConnection, socket.socket]]:
    """Yield a client's connection, and its other end."""
    near, far = socket.socketpair()
    with far, closing(BulkConnection(near, "server", None)) as connection:
        yield connection, far


Ends = tuple[BulkConnection, socket.socket]
PULL = PullRequest(shards=[PullItem(shard_id=0, epoch=1)])


def test_a_call_to_a_silent_server_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be halted, or its machine cut off: no event closes the socket."""
    monkeypatch.setattr(client_connection, "SILENCE_S", 0.2)
    started_s = time.monotonic()
    with pytest.raises(Unavailable, match="no data for"):
        list(ends[0].pull(PULL, [], 60.0))
    assert time.monotonic() - started_s < 10.0
    assert not ends[0].is_usable


def test_a_slow_server_that_sends_heartbeats_is_waited_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits until the call's time limit."""
    monkeypatch.setattr(client_connection, "SILENCE_S", 0.3)
    answers = ends[0].pull(PULL, [], 1.0)
    ends[1].sendall(bulk.header(FrameKind.BEAT))
    monkeypatch.setattr(client_connection, "SILENCE_S", 30.0)
    with pytest.raises(DeadlineExceeded):
        list(answers)


def test_a_closed_connection_is_an_error_and_no_end_of_the_call(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(Unavailable, match="server"):
        list(ends[0].pull(PULL, [], 60.0))


def test_the_reason_of_a_server_that_hung_up_is_raised(ends: Ends) -> None:
    """The server refuses the call while the client still sends it."""
    refusal = InvalidSpec("too many shards", seen="9", expected="at most 8")
    ends[1].sendall(bulk.header(FrameKind.BEAT))
    ends[1].sendall(bulk.message(FrameKind.ERROR, to_detail(refusal).SerializeToString()))
    ends[1].close()
    with pytest.raises(InvalidSpec, match="too many shards"):
        list(ends[0].pull(PULL, [], 60.0))


@pytest.mark.parametrize("kind", [FrameKind.MESSAGE, FrameKind.ERROR])
def test_an_answer_that_does_not_parse_is_an_error(ends: Ends, kind: FrameKind) -> None:
    ends[1].sendall(bulk.message(kind, b"\xff"))
    with pytest.raises(MalformedMessage, match="the server at server is malformed"):
        list(ends[0].pull(PULL, [], 60.0))
    assert not ends[0].is_usable


def test_an_abandoned_call_makes_the_connection_unusable(ends: Ends) -> None:
    """Data in transit must not be read as the answer to the next call."""
    version = bulk.message(FrameKind.MESSAGE, b"\x0a\x06\x08\x00\x10\x01\x18\x08")
    ends[1].sendall(version)
    answers = ends[0].pull(PULL, [], 60.0)
    assert next(answers) is not None
    answers.close()  # type: ignore[attr-defined]
    assert not ends[0].is_usable


def test_close_ends_a_call_in_progress(ends: Ends) -> None:
    answers = ends[0].pull(PULL, [], 60.0)
    ends[1].sendall(bulk.message(FrameKind.MESSAGE, b"\x0a\x06\x08\x00\x10\x01\x18\x08"))
    assert next(answers) is not None
    ends[0].close()
    with pytest.raises(Unavailable):
        next(answers)
