"""The bytes of a bulk connection, plain or over TLS. asyncio's socket methods do not support
TLS."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from shoal_proto.pieces import Buffer
from shoal_proto.tls import identity

AT_A_TIME_BYTES = 256 * 1024
"""Most bytes that one send encrypts, or one `receive_into` decrypts."""

Result = TypeVar("Result")


class ByteChannel(Protocol):
    """A connected, non-blocking socket. One task reads; one task at a time writes."""

    async def receive_into(self, space: memoryview) -> int:
        """Receive bytes; return their number, 0 at the end. Raises OSError."""
        ...

    async def send_all(self, data: Buffer) -> None:
        """Raises OSError."""
        ...

    async def send_file(self, descriptor: int, start: int, num_bytes: int) -> None:
        """Send part of an unchanging file. Raises OSError."""
        ...

    def send_some(self, data: bytes) -> int:
        """Send without waiting; return the number of bytes sent, perhaps 0. The rest must be sent
        next. Raises OSError if nothing was sent and the next call may send other data."""
        ...


class PlainBytes:
    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def receive_into(self, space: memoryview) -> int:
        return await self._loop.sock_recv_into(self._socket, space)

    async def send_all(self, data: Buffer) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def send_file(self, descriptor: int, start: int, num_bytes: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            await self._loop.sock_sendfile(self._socket, file, start, num_bytes, fallback=False)

    def send_some(self, data: bytes) -> int:
        return self._socket.send(data)


class TlsBytes:
    """Bytes over TLS. If a record was not sent whole, OpenSSL needs the same bytes again: `_Waits`
    repeats the call."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        self._waits = _Waits(connected)

    async def receive_into(self, space: memoryview) -> int:
        """Receive the records that have arrived and fit, each of at most 16 KiB."""
        try:
            count = await self._waits.until(partial(self._socket.recv_into, space))
            end = min(len(space), AT_A_TIME_BYTES)
            while 0 < count < end and self._socket.pending():
                count += self._socket.recv_into(space[count:end])
        except ssl.SSLEOFError:
            # The other end closed the connection without a TLS shutdown.
            return 0
        return count

    async def send_all(self, data: Buffer) -> None:
        view = memoryview(data)
        while view:
            part = view[:AT_A_TIME_BYTES]
            count = await self._waits.until(partial(self._socket.send, part))
            view = view[count:]

    async def send_file(self, descriptor: int, start: int, num_bytes: int) -> None:
        for at in range(start, start + num_bytes, AT_A_TIME_BYTES):
            left_bytes = start + num_bytes - at
            await self.send_all(os.pread(descriptor, min(AT_A_TIME_BYTES, left_bytes), at))

    def send_some(self, data: bytes) -> int:
        try:
            return self._socket.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            # OpenSSL may have begun a record: `data` must be sent next.
            return 0


class _Waits:
    """Repeats calls of a TLS socket once it is ready. One task reads and one writes; TLS may make
    either wait for either direction."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Future[None]] = set()
        self._writers: set[asyncio.Future[None]] = set()

    async def until(self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                await self._ready(self._readers, self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._writers, self._loop.add_writer, self._loop.remove_writer)

    async def _ready(
        self,
        waiting: set[asyncio.Future[None]],
        add: Callable[..., None],
        remove: Callable[[int], bool],
    ) -> None:
        ready = self._loop.create_future()
        waiting.add(ready)
        number = self._socket.fileno()
        add(number, _wake, waiting)
        try:
            await ready
        finally:
            waiting.discard(ready)
            if not waiting:
                remove(number)


def _wake(waiting: "set[asyncio.Future[None]]") -> None:
    for each in waiting:
        if not each.done():
            each.set_result(None)


def bytes_of(connected: socket.socket) -> ByteChannel:
    return TlsBytes(connected) if isinstance(connected, ssl.SSLSocket) else PlainBytes(connected)


async def encrypted(connected: socket.socket) -> socket.socket:
    """Wrap a client's connection in TLS if this process has a certificate. Use only the result
    afterwards. Raises OSError if the handshake fails."""
    own = identity.own()
    if own is None:
        return connected
    wrapped = own.material.server.wrap_socket(
        connected, server_side=True, do_handshake_on_connect=False
    )
    try:
        await _Waits(wrapped).until(wrapped.do_handshake)
    except BaseException:
        wrapped.close()
        raise
    return wrapped
