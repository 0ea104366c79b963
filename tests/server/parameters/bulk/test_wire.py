"""Frames are sent whole and in order, by each of the methods that send. During pauses in reading,
frames whose answer may wait stay unread, and others do not."""

import asyncio
import socket

import pytest

from shoal_proto import bulk
from shoal_proto.bulk import Frame, FrameKind
from shoal_proto.errors import MalformedMessage
from shoal_server.parameters.bulk import wire as wires
from shoal_server.parameters.bulk.wire import (
    AWAITED_S,
    MANY_PUSHES,
    FrameConnection,
    PeerHungUp,
    ReadingPauses,
)

LARGE = bytes(range(256)) * 16 * 1024
"""More than the kernel accepts at once."""
PUSH = bulk.message(FrameKind.MESSAGE, b"push")
NEVER_S = 3600.0


async def read(end: socket.socket, num_bytes: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(20):
        while len(parts) < num_bytes:
            parts += await loop.sock_recv(end, num_bytes - len(parts))
    return bytes(parts)


async def test_a_frame_that_the_kernel_accepts_is_sent_at_once(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    assert FrameConnection(ours).send_now(b"frame")
    assert theirs.recv(16) == b"frame"


async def test_the_rest_of_a_frame_is_sent_before_any_other_frame(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel accepts only a part of it at first."""
    ours, theirs = ends
    wire = FrameConnection(ours)
    assert wire.send_now(LARGE)
    assert not wire.send_now(b"too early")
    behind = asyncio.create_task(wire.send(b"behind"))
    assert await read(theirs, len(LARGE) + 6) == LARGE + b"behind"
    await behind
    assert wire.send_now(b"later")
    assert await read(theirs, 5) == b"later"


async def test_no_frame_is_sent_between_the_parts_of_another(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    wire = FrameConnection(ours)
    sending = asyncio.create_task(wire.send(LARGE, b"end"))
    await asyncio.sleep(0)
    assert not wire.send_now(b"between")
    assert await read(theirs, len(LARGE) + 3) == LARGE + b"end"
    await sending


async def test_a_frame_is_not_sent_over_a_closed_connection(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The method returns False."""
    ours, theirs = ends
    theirs.close()
    assert not FrameConnection(ours).send_now(b"frame")


def free_slot(shard_id: int) -> bytes:
    return bulk.header(FrameKind.FREE_SLOT, shard_id=shard_id)


async def test_only_frames_that_are_not_delivered_end_a_wait(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Frames are delivered in order, even if one arrives in two parts, or before a reader waits."""
    ours, theirs = ends
    wire, taken, halfway = FrameConnection(ours), list[int](), asyncio.Event()
    theirs.send(free_slot(1))

    def take(frame: Frame) -> bool:
        if frame.shard_id > 4:
            return False
        taken.append(frame.shard_id)
        if len(taken) == 2:
            halfway.set()
        return True

    wire.deliver(take)
    waiting = asyncio.create_task(wire.next_frame())
    await asyncio.sleep(0)
    theirs.send(free_slot(2) + free_slot(3)[:7])
    async with asyncio.timeout(20):
        await halfway.wait()
    assert taken == [1, 2]
    theirs.send(free_slot(3)[7:] + free_slot(4) + free_slot(5) + free_slot(1))
    async with asyncio.timeout(20):
        assert (await waiting).shard_id == 5
    assert taken == [1, 2, 3, 4]
    wire.deliver(None)
    assert (await wire.next_frame()).shard_id == 1


async def test_an_error_of_a_delivered_frame_is_raised_in_the_wait(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The end of the connection is raised in the wait as well."""
    ours, theirs = ends
    wire = FrameConnection(ours)

    def refuse(frame: Frame) -> bool:
        raise MalformedMessage("no such shard", seen=str(frame.shard_id))

    wire.deliver(refuse)
    waiting = asyncio.create_task(wire.next_frame())
    await asyncio.sleep(0)
    theirs.send(free_slot(7))
    with pytest.raises(MalformedMessage, match="7"):
        async with asyncio.timeout(20):
            await waiting
    waiting = asyncio.create_task(wire.next_frame())
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(PeerHungUp):
        async with asyncio.timeout(20):
            await waiting


@pytest.mark.parametrize("is_gone", [False, True], ids=["the sender lives", "the sender is gone"])
async def test_frames_sent_on_one_machine_are_read_after_the_end_of_reading(
    ends: tuple[socket.socket, socket.socket], is_gone: bool
) -> None:
    """All frames that were sent before are read, and none can be sent afterwards."""
    ours, theirs = ends
    wire, other = FrameConnection(ours), FrameConnection(theirs)
    assert wire.is_local
    assert other.send_now(free_slot(1)) and other.send_now(free_slot(2)) and other.is_idle
    # This frame stays unread: when the connection is closed, the kernel reports a reset.
    assert wire.send_now(free_slot(9))
    if is_gone:
        theirs.close()
    wire.end_reading()
    assert not other.send_now(free_slot(3))
    async with asyncio.timeout(20):
        assert [(await wire.next_frame()).shard_id for _ in range(2)] == [1, 2]
        with pytest.raises(PeerHungUp):
            await wire.next_frame()


async def test_a_tcp_connection_is_not_local() -> None:
    """Data sent over TCP may be in transit, and lost when the sender ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        with ours:
            assert not FrameConnection(ours).is_local


class Reader:
    """Reader of frames whose answers may all wait."""

    def __init__(self, ours: socket.socket) -> None:
        self.wire = FrameConnection(ours)
        self.num_read = 0
        self.first = asyncio.Event()
        self.wire.deliver(self._take)

    def _take(self, frame: Frame) -> bool:
        self.wire.pauses.read(may_wait=True, now_s=asyncio.get_running_loop().time())
        self.num_read += 1
        self.first.set()
        return True


async def paused(reader: Reader, theirs: socket.socket) -> "asyncio.Task[Frame]":
    """Start the reader; return once it has read one push, and another has arrived."""
    reading = asyncio.create_task(reader.wire.next_frame())
    theirs.sendall(PUSH)
    async with asyncio.timeout(20):
        await reader.first.wait()
    theirs.sendall(PUSH)
    for _ in range(5):
        await asyncio.sleep(0)
    assert reader.num_read == 1
    return reading


@pytest.mark.parametrize("is_end_of_reading", [True, False])
async def test_the_end_of_reading_or_sending_ends_a_pause(
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    is_end_of_reading: bool,
) -> None:
    """A successor waits until all frames are read."""
    monkeypatch.setattr(wires, "PAUSE_S", NEVER_S)
    reader = Reader(ends[0])
    reading = await paused(reader, ends[1])
    if is_end_of_reading:
        reader.wire.end_reading()
    else:
        reader.wire.end_sending()
    # No further pause begins before the end.
    with pytest.raises(PeerHungUp):
        async with asyncio.timeout(20):
            await reading
    assert reader.num_read == 2


async def test_frames_that_arrive_during_a_pause_are_read_after_it(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    reader = Reader(ends[0])
    reading = await paused(reader, ends[1])
    ends[1].close()
    with pytest.raises(PeerHungUp):
        async with asyncio.timeout(20):
            await reading
    assert reader.num_read == 2


def test_there_is_no_pause_after_a_frame_with_an_awaited_answer() -> None:
    pauses = ReadingPauses()
    pauses.read(may_wait=True, now_s=10.0)
    assert pauses.take(10.0) > 0.0
    pauses.read(may_wait=False, now_s=11.0)
    assert pauses.take(11.0) == 0.0
    pauses.read(may_wait=True, now_s=11.0 + AWAITED_S / 2)
    assert pauses.take(11.0 + AWAITED_S / 2) == 0.0
    pauses.read(may_wait=True, now_s=11.0 + 2 * AWAITED_S)
    assert pauses.take(11.0 + 2 * AWAITED_S) > 0.0


def test_there_is_no_pause_after_many_frames_at_once() -> None:
    """Many frames would fill the shared memory during a pause, and their sender would then wait for
    it."""
    pauses = ReadingPauses()
    for _ in range(MANY_PUSHES + 1):
        pauses.read(may_wait=True, now_s=10.0)
    assert pauses.take(10.0) == 0.0
    pauses.read(may_wait=True, now_s=10.0 + AWAITED_S / 2)
    assert pauses.take(10.0 + AWAITED_S / 2) == 0.0


def test_there_is_no_second_pause_without_another_frame() -> None:
    pauses = ReadingPauses()
    pauses.read(may_wait=True, now_s=10.0)
    assert pauses.take(10.0) > 0.0
    assert pauses.take(10.0 + AWAITED_S / 2) == 0.0
