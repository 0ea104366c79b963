"""Sending of a call's parts, and its order with receiving."""

import mmap
import os
import select
import socket
from collections.abc import Iterator

import pytest

from shoal_client.bulk.arena import Arena
from shoal_client.bulk.connection import BulkConnection
from shoal_client.bulk.sending import Sending
from shoal_client.shards.parts import PIECE_BYTES, GradientPart, in_pieces
from shoal_proto import bulk
from shoal_proto.bulk import Frame, FrameKind, FrameReader
from shoal_proto.checksum import verify
from shoal_proto.errors import Overloaded
from shoal_proto.status import to_detail
from shoal_proto.v1.parameters_pb2 import PushOutcome, PushReply, PushRequest
from shoal_server.core.shards.placement import TARGET_SHARD_BYTES

OPENING = b""
TIMEOUT_S = 10.0


def sent(num_bytes: int) -> list[Frame]:
    """Return the frames of a call with one part of so many bytes."""
    data = memoryview(bytes(range(256)) * (num_bytes // 256))
    part = GradientPart(shard_id=1, num_bytes=num_bytes, pieces=in_pieces([data]))
    ours, theirs = socket.socketpair()
    reader = FrameReader()
    frames: list[Frame] = []
    with ours, theirs:
        ours.setblocking(False)
        sending = Sending(ours, OPENING, [part], None)
        while not frames or frames[-1].kind is not FrameKind.END:
            sending.send_available()
            reader.received(theirs.recv_into(reader.space()))
            while (frame := reader.next()) is not None:
                frames.append(frame)
    return frames


@pytest.mark.parametrize(
    ("num_bytes", "num_pieces"), [(TARGET_SHARD_BYTES, 1), (2 * PIECE_BYTES + 256, 3)]
)
def test_a_shard_of_the_usual_size_is_one_piece(num_bytes: int, num_pieces: int) -> None:
    """The server need not join pieces then."""
    *pieces, _ = sent(num_bytes)
    assert [frame.kind for frame in pieces] == [FrameKind.PIECE] * num_pieces
    assert sum(frame.num_bytes for frame in pieces) == num_bytes
    for frame in pieces:
        verify("a piece", frame.checksum, frame.body)


def received_by(connected: socket.socket, reader: FrameReader) -> list[int]:
    """Return the shards that the other end has announced since the last call, in order."""
    try:
        reader.received(connected.recv_into(reader.space()))
    except BlockingIOError:
        return []
    frames = iter(reader.next, None)
    return [frame.shard_id for frame in frames if frame.kind is FrameKind.PLACED]


def test_a_large_part_is_announced_before_the_next_one_is_copied() -> None:
    """The server reads a part while the client copies the next one: it is not idle until all slots
    are full."""
    data = memoryview(bytes(TARGET_SHARD_BYTES))
    ours, theirs = socket.socketpair()
    reader = FrameReader()
    lengths: list[list[int]] = []

    def parts() -> Iterator[GradientPart]:
        for shard_id in range(3):
            lengths.append(received_by(theirs, reader))
            yield GradientPart(shard_id=shard_id, num_bytes=len(data), pieces=in_pieces([data]))

    with ours, theirs, mmap.mmap(-1, 3 * len(data)) as mapped:
        ours.setblocking(False)
        theirs.setblocking(False)
        arena = Arena(mapped, len(data))
        Sending(ours, OPENING, parts(), arena).send_available()
        del arena
    assert lengths == [[], [0], [1]]


def test_a_free_slot_is_filled_before_the_next_answer_is_returned() -> None:
    """Answers to the first two parts have arrived, and the server waits for the third part."""
    data = memoryview(bytes(TARGET_SHARD_BYTES))
    parts = [
        GradientPart(shard_id=i, num_bytes=len(data), pieces=in_pieces([data])) for i in range(3)
    ]
    ours, theirs = socket.socketpair()
    reader = FrameReader()
    with theirs, mmap.mmap(-1, 2 * len(data)) as mapped:
        theirs.setblocking(False)
        arena = Arena(mapped, len(data))
        connection = BulkConnection(ours, "the server", arena)
        for shard_id in range(2):
            reply = PushReply(outcomes=[PushOutcome(shard_id=shard_id)])
            theirs.sendall(bulk.message(FrameKind.MESSAGE, reply.SerializeToString()))
        replies = connection.push(PushRequest(), parts, TIMEOUT_S)
        next(replies)
        assert received_by(theirs, reader) == [0, 1]
        next(replies)
        assert received_by(theirs, reader) == [2]
        connection.close()
        del replies, arena, connection


def test_an_error_sent_before_the_connection_closed_is_raised() -> None:
    """The next part can no longer be sent."""
    data = memoryview(bytes(TARGET_SHARD_BYTES))
    parts = [
        GradientPart(shard_id=i, num_bytes=len(data), pieces=in_pieces([data])) for i in range(2)
    ]
    ours, theirs = socket.socketpair()
    shared = mmap.mmap(-1, len(data))
    connection = BulkConnection(ours, "the server", Arena(shared, len(data)))
    with theirs:
        reply = PushReply(outcomes=[PushOutcome(shard_id=0)])
        theirs.sendall(bulk.message(FrameKind.MESSAGE, reply.SerializeToString()))
        detail = to_detail(Overloaded("too much", seen="a push", expected="fewer"))
        theirs.sendall(bulk.message(FrameKind.ERROR, detail.SerializeToString()))
        replies = connection.push(PushRequest(), parts, TIMEOUT_S)
        next(replies)
    with pytest.raises(Overloaded, match="too much"):
        next(replies)


@pytest.mark.parametrize(("num_parts", "polls"), [(3, True), (1, False)])
def test_a_call_of_large_parts_polls_for_answers_before_it_sleeps(
    num_parts: int, polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of several large parts polls if the server can use another processor; a call of one
    part sleeps."""
    data = memoryview(bytes(TARGET_SHARD_BYTES))
    part = [
        GradientPart(shard_id=i, num_bytes=len(data), pieces=in_pieces([data])) for i in range(3)
    ]
    ours, theirs = socket.socketpair()
    shared = mmap.mmap(-1, 3 * len(data))
    how_answered: list[str] = []

    def answers(how: str) -> None:
        how_answered.append(how)
        reply = PushReply(outcomes=[PushOutcome(shard_id=0)])
        theirs.sendall(bulk.message(FrameKind.MESSAGE, reply.SerializeToString()))

    class Poll:
        def register(self, *_: object) -> None:
            """Register nothing: poll() of this fake does not wait for a socket."""

        def poll(self, _: float) -> None:
            answers("asleep")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_yield", lambda: answers("polling"))
    monkeypatch.setattr(select, "poll", Poll)
    connection = BulkConnection(ours, "the server", Arena(shared, len(data)))
    with theirs:
        next(connection.push(PushRequest(), part[:num_parts], TIMEOUT_S))
    assert how_answered == ["polling" if polls else "asleep"]
