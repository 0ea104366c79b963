"""Pauses in reading: frames whose answer may wait stay unread for a time, others do not."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from shoal_proto import bulk
from shoal_proto.bulk import Frame, FrameKind
from shoal_server.parameters.bulk import reading_pauses
from shoal_server.parameters.bulk.reading_pauses import AWAITED_S, MANY, ReadingPauses
from shoal_server.parameters.bulk.wire import FrameConnection, PeerHungUp

PUSH = bulk.message(FrameKind.MESSAGE, b"push")
NEVER_S = 3600.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


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
    monkeypatch.setattr(reading_pauses, "PAUSE_S", NEVER_S)
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
    for _ in range(MANY + 1):
        pauses.read(may_wait=True, now_s=10.0)
    assert pauses.take(10.0) == 0.0
    pauses.read(may_wait=True, now_s=10.0 + AWAITED_S / 2)
    assert pauses.take(10.0 + AWAITED_S / 2) == 0.0


def test_there_is_no_second_pause_without_another_frame() -> None:
    pauses = ReadingPauses()
    pauses.read(may_wait=True, now_s=10.0)
    assert pauses.take(10.0) > 0.0
    assert pauses.take(10.0 + AWAITED_S / 2) == 0.0
