"""Frames leave whole and in order, whichever way they are sent."""

import asyncio
import socket

import pytest

from shoal_proto import bulk
from shoal_proto.bulk import Frame, FrameKind
from shoal_proto.errors import MalformedMessage
from shoal_server.parameters.bulk.wire import FrameConnection, PeerHungUp

LARGE = bytes(range(256)) * 16 * 1024
"""More than the kernel accepts at once."""


async def read(end: socket.socket, num_bytes: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(20):
        while len(parts) < num_bytes:
            parts += await loop.sock_recv(end, num_bytes - len(parts))
    return bytes(parts)


async def test_a_frame_that_finds_room_goes_at_once(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    assert FrameConnection(ours).send_now(b"frame")
    assert theirs.recv(16) == b"frame"


async def test_what_the_kernel_does_not_take_follows_before_all_else(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Other frames wait until it has gone."""
    ours, theirs = ends
    wire = FrameConnection(ours)
    assert wire.send_now(LARGE)
    assert not wire.send_now(b"too early")
    behind = asyncio.create_task(wire.send(b"behind"))
    assert await read(theirs, len(LARGE) + 6) == LARGE + b"behind"
    await behind
    assert wire.send_now(b"later")
    assert await read(theirs, 5) == b"later"


async def test_nothing_goes_between_the_parts_of_a_frame(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    wire = FrameConnection(ours)
    sending = asyncio.create_task(wire.send(LARGE, b"end"))
    await asyncio.sleep(0)
    assert not wire.send_now(b"between")
    assert await read(theirs, len(LARGE) + 3) == LARGE + b"end"
    await sending


async def test_a_connection_that_is_gone_takes_nothing(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Readers and senders of the connection find out."""
    ours, theirs = ends
    theirs.close()
    assert not FrameConnection(ours).send_now(b"frame")


def free_slot(shard_id: int) -> bytes:
    return bulk.header(FrameKind.FREE_SLOT, shard_id=shard_id)


async def test_frames_are_taken_when_they_come_and_only_the_others_wake_who_waits(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Frames stay in order, even if one comes in two parts, or before there is a reader."""
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


async def test_what_is_wrong_with_a_frame_is_told_to_who_waits(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Errors are those raised where a frame is handled, and the end of the connection."""
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


@pytest.mark.parametrize("is_gone", [False, True], ids=["it lives", "it is gone"])
async def test_what_was_sent_on_one_machine_is_read_although_nothing_more_is_taken(
    ends: tuple[socket.socket, socket.socket], is_gone: bool
) -> None:
    """Frames that the sender saw leave are not lost, and none leaves that is not read."""
    ours, theirs = ends
    wire, other = FrameConnection(ours), FrameConnection(theirs)
    assert wire.is_local
    assert other.send_now(free_slot(1)) and other.send_now(free_slot(2)) and other.is_quiet
    # The reply stays unread: the kernel then reports a reset when the connection is closed.
    assert wire.send_now(free_slot(9))
    if is_gone:
        theirs.close()
    wire.end_reading()
    assert not other.send_now(free_slot(3))
    async with asyncio.timeout(20):
        assert [(await wire.next_frame()).shard_id for _ in range(2)] == [1, 2]
        with pytest.raises(PeerHungUp):
            await wire.next_frame()


async def test_what_was_sent_to_another_machine_may_be_lost() -> None:
    """The data may still be in transit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        with ours:
            assert not FrameConnection(ours).is_local
