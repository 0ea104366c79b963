"""Frames over a socket, on the event loop."""

import asyncio
import socket
from collections.abc import Iterator, Sequence

import numpy as np

from shoal_proto.bulk import Frame, FrameReader
from shoal_proto.pieces import Buffer

SMALL_BYTES = 32 * 1024


class HungUp(Exception):
    """The other end has closed the connection, or it broke."""


class FrameConnection:
    """One task may read and any number may write. The socket does not block."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(_unset)
        self._writing = asyncio.Lock()
        self._sent_s = self._loop.time()

    async def next_frame(self) -> Frame:
        """Raises HungUp, MalformedMessage or ChecksumMismatch: nothing can be read after it."""
        while (frame := self._reader.next()) is None:
            try:
                count = await self._loop.sock_recv_into(self.socket, self._reader.space())
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
            try:
                for run in _runs(parts):
                    await self._loop.sock_sendall(self.socket, run)
            except OSError as error:
                raise HungUp(repr(error)) from error

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
