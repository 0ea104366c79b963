"""Frames over a socket, on the event loop."""

import asyncio
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import structlog

from shoal_proto.bulk import Frame, FrameReader
from shoal_proto.pieces import Buffer
from shoal_server.parameters.bulk.encryption import bytes_of

log = structlog.get_logger(__name__)

SMALL_BYTES = 32 * 1024


class HungUp(Exception):
    """The other end has closed the connection, or it broke."""


class FrameConnection:
    """One task may read and any number may write. The socket does not block."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._bytes = bytes_of(connected)
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(_unset)
        self._writing = asyncio.Lock()
        self._rest: Buffer = b""
        """Of a frame that `send_now` could not send whole."""
        self._flushing: asyncio.Task[None] | None = None
        self._sent_s = self._loop.time()

    async def next_frame(self) -> Frame:
        """Raises HungUp, MalformedMessage or ChecksumMismatch: nothing can be read after it."""
        while (frame := self._reader.next()) is None:
            try:
                count = await self._bytes.receive_into(self._reader.space())
            except OSError as error:
                raise HungUp(repr(error)) from error
            if not count:
                raise HungUp("closed by the other end")
            self._reader.received(count)
        return frame

    async def send(self, *parts: Buffer) -> None:
        """Raises HungUp. Who is cancelled here may leave half a frame behind: close the socket."""
        async with self._writing:
            self._sent_s = self._loop.time()
            rest, self._rest = self._rest, b""
            try:
                for run in _runs([rest, *parts] if rest else parts):
                    await self._bytes.send_all(run)
            except OSError as error:
                raise HungUp(repr(error)) from error

    def send_now(self, frame: bytes) -> bool:
        """Send a frame without a turn of the event loop. False, and then nothing of it is sent,
        while something else is being sent, the kernel has no room, or the connection is broken."""
        if not self.is_quiet:
            return False
        try:
            count = self._bytes.send_some(frame)
        except OSError:
            # Whoever sends or reads next hears of what is more than no room.
            return False
        self._sent_s = self._loop.time()
        if count < len(frame):
            self._rest = memoryview(frame)[count:]
            self._flushing = self._loop.create_task(self._flush(), name="flush")
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being sent."""
        return not self._writing.locked() and not self._rest

    async def _flush(self) -> None:
        try:
            await self.send()
        except HungUp as hung_up:
            log.debug("frame_not_flushed", reason=str(hung_up))

    @property
    def silent_s(self) -> float:
        """Since when nothing was sent; 0 while something is."""
        return 0.0 if self._writing.locked() else self._loop.time() - self._sent_s


def _runs(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    """The same bytes in fewer parts: a call of the kernel costs as much as to copy a few KiB."""
    small: list[Buffer] = []
    for part in parts:
        if len(part) <= SMALL_BYTES:
            small.append(part)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield part
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)


def _unset(num_bytes: int) -> memoryview:
    """Memory for a piece. Nobody sees it before it is filled."""
    return np.empty(num_bytes, dtype=np.uint8).data
