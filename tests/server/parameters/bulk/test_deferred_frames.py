"""Frames that no reader waits for are sent together, so that they wake the other end once."""

import asyncio
import socket

import pytest

from shoal_server.parameters.bulk import deferred_frames
from shoal_server.parameters.bulk.deferred_frames import DeferredFrames
from shoal_server.parameters.bulk.wire import FrameConnection

LARGE = bytes(8 * 1024 * 1024)
"""More than the kernel accepts at once."""


async def read(end: socket.socket) -> bytes:
    """Wait for bytes, and return those that have arrived."""
    async with asyncio.timeout(20):
        return await asyncio.get_running_loop().sock_recv(end, 1024)


async def test_the_newest_frame_of_each_shard_is_sent_after_a_short_time(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    late = DeferredFrames(FrameConnection(ours), freed_together=8)
    late.queue_frame("shard 0", b"0 at 1;")
    late.queue_frame("shard 1", b"1 at 1;")
    late.queue_frame("shard 0", b"0 at 2;")
    late.free(b"place 0;")
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    assert await read(theirs) == b"0 at 2;1 at 1;place 0;"


async def test_slots_are_freed_together_and_after_earlier_frames(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender must drop a received record before its slot is freed; otherwise it copies it."""
    monkeypatch.setattr(deferred_frames, "WITHIN_S", 3600.0)
    ours, theirs = ends
    late = DeferredFrames(FrameConnection(ours), freed_together=2)
    late.queue_frame("shard 0", b"0 at 1;")
    late.free(b"place 0;")
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    late.free(b"place 1;")
    assert theirs.recv(1024) == b"0 at 1;place 0;place 1;"
    late.close()


async def test_an_urgent_frame_does_not_overtake_late_ones(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late frames are sent first, even if the kernel does not accept them at once."""
    monkeypatch.setattr(deferred_frames, "WITHIN_S", 3600.0)
    ours, theirs = ends
    wire = FrameConnection(ours)
    late = DeferredFrames(wire, freed_together=8)
    late.queue_frame("shard 0", b"0 at 1;")
    assert late.send_now(b"refused;")
    assert theirs.recv(1024) == b"0 at 1;refused;"
    assert wire.send_now(LARGE)
    late.queue_frame("shard 0", b"0 at 2;")
    assert not late.send_now(b"refused;")
    behind = asyncio.create_task(wire.send(b"refused;"))
    seen = bytearray()
    while len(seen) < len(LARGE) + 15:
        async with asyncio.timeout(20):
            seen += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
    assert seen[len(LARGE) :] == b"0 at 2;refused;"
    await behind
    late.close()
