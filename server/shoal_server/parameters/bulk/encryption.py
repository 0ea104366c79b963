"""The bytes of a bulk connection: plain, or within TLS, which asyncio refuses for sockets."""

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
"""Encrypted or decrypted in one go, after which others have their turn on the event loop."""

Result = TypeVar("Result")


class Bytes(Protocol):
    """A connected socket that does not block. One task reads, one at a time writes."""

    async def receive_into(self, space: memoryview) -> int:
        """How many bytes came; 0 at the end. Raises OSError."""
        ...

    async def send_all(self, data: Buffer) -> None:
        """Raises OSError."""
        ...

    async def send_file(self, descriptor: int, start: int, num_bytes: int) -> None:
        """Send part of a file that nobody changes any more. Raises OSError."""
        ...

    def send_some(self, data: bytes) -> int:
        """How much of it is on its way; the rest must be sent next. Raises OSError if nothing
        is."""
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
        """Its pages go to the network without a copy."""
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            await self._loop.sock_sendfile(self._socket, file, start, num_bytes, fallback=False)

    def send_some(self, data: bytes) -> int:
        return self._socket.send(data)


class TlsBytes:
    """OpenSSL wants the same bytes again where a record did not go out whole: `_Waits` does so."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        self._waits = _Waits(connected)

    async def receive_into(self, space: memoryview) -> int:
        """A record has 16 KiB at most: as many as are there, as far as they fit."""
        try:
            count = await self._waits.until(partial(self._socket.recv_into, space))
            end = min(len(space), AT_A_TIME_BYTES)
            while 0 < count < end and self._socket.pending():
                count += self._socket.recv_into(space[count:end])
        except ssl.SSLEOFError:
            # Closed without a word, as every plain connection is.
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
            left = start + num_bytes - at
            await self.send_all(os.pread(descriptor, min(AT_A_TIME_BYTES, left), at))

    def send_some(self, data: bytes) -> int:
        try:
            return self._socket.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            # It may have begun with a record of it: all of it is to be sent next, and nothing else.
            return 0


class _Waits:
    """Calls of a TLS socket again when it can go on. One task in each direction at a time; either
    may have to wait for the other direction, too."""

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


def bytes_of(connected: socket.socket) -> Bytes:
    """How to read and write the connection. On the running loop."""
    return TlsBytes(connected) if isinstance(connected, ssl.SSLSocket) else PlainBytes(connected)


async def encrypted(connected: socket.socket) -> socket.socket:
    """The connection that a client made, within TLS where this process has a certificate; the one
    that was given is not to be used any more then. Raises OSError for a client without one."""
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
