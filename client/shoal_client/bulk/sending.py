"""What a call still has to send: as much of it as goes now, without ever waiting."""

import socket
import ssl
from collections import deque
from collections.abc import Iterable, Iterator

from shoal_client.bulk.arena import Arena
from shoal_client.shards.parts import Part
from shoal_proto import bulk
from shoal_proto.bulk import Kind
from shoal_proto.checksum import crc32
from shoal_proto.pieces import Buffer

PIECE_BYTES = 2 * 1024 * 1024
"""Most shards of parameters fit into one: a server that gets them in several has to join them."""
LOW_WATER_BYTES = 256 * 1024
"""With fewer bytes on their way to the kernel, more are made ready. What was copied into shared
memory counts too: the server begins with the first large part while the next one is copied."""
RECORD_BYTES = 16 * 1024
"""The most that TLS encrypts at a time."""
MAX_BUFFERS = 256
"""Given to the kernel at a time; Linux takes 1024."""


class Sending:
    """The opening of a call, its parts, and its end."""

    def __init__(
        self,
        connected: socket.socket,
        opening: bytes,
        parts: Iterable[Part],
        arena: Arena | None,
    ) -> None:
        self._socket = connected
        self._arena = arena
        self._ready: deque[memoryview] = deque()
        self._record = memoryview(b"")
        """Of what was ready: what OpenSSL is at."""
        self._ready_bytes = 0
        self._frames = self._all_frames(parts)
        self._is_over = False
        self._answered: set[int] = set()
        self._put(opening)

    @property
    def is_stuck(self) -> bool:
        """Whether the kernel took less than there is."""
        return bool(self._ready or self._record)

    def answered(self, shard_id: int) -> None:
        """The server is done with that shard: refused, it needs not even be sent."""
        self._answered.add(shard_id)
        if self._arena is not None:
            self._arena.release(shard_id)

    def go_on(self) -> None:
        """Send until the kernel takes no more, no place is free for the next part, or all is sent.
        Raises OSError for a connection that broke."""
        while True:
            self._make_ready()
            if not self._ready or not self._send():
                return

    def go_on_between(self) -> None:
        """As `go_on`, while answers that came are still to be read: the server gets the next part
        while they are."""
        try:
            self.go_on()
        except OSError:
            # What did not go is still there: `go_on` meets it again, once all answers are read.
            return

    def _make_ready(self) -> None:
        untold_from = self._copied_bytes
        while (
            not self._is_over
            and self._ready_bytes + self._copied_bytes - untold_from < LOW_WATER_BYTES
        ):
            buffers = next(self._frames, None)
            if buffers is None:
                self._is_over = True
            elif not buffers:
                return
            else:
                for buffer in buffers:
                    self._put(buffer)

    @property
    def _copied_bytes(self) -> int:
        return self._arena.copied_bytes if self._arena is not None else 0

    def _all_frames(self, parts: Iterable[Part]) -> Iterator[list[Buffer]]:
        """What to send, in pieces; an empty one while a part waits for a place."""
        for part in parts:
            if self._arena is not None and self._arena.fits(part):
                while not self._arena.has_room and part.shard_id not in self._answered:
                    yield []
                if part.shard_id not in self._answered:
                    yield list(self._arena.place(part))
                continue
            if part.shard_id in self._answered:
                continue
            if self._arena is not None:
                # No room: its values come as pieces.
                yield [bulk.header(Kind.ROOM, shard_id=part.shard_id)]
            for offset_bytes, buffers in part.pieces(PIECE_BYTES):
                checksum = 0
                for buffer in buffers:
                    checksum = crc32(buffer, checksum)
                head = bulk.header(
                    Kind.PIECE,
                    shard_id=part.shard_id,
                    offset_bytes=offset_bytes,
                    num_bytes=sum(map(len, buffers)),
                    checksum=checksum,
                )
                yield [head, *buffers]
        yield [bulk.header(Kind.END)]

    def _put(self, buffer: Buffer) -> None:
        self._ready.append(memoryview(buffer))
        self._ready_bytes += len(buffer)

    def _send(self) -> bool:
        """Whether all that was ready is gone."""
        if isinstance(self._socket, ssl.SSLSocket):
            return self._send_encrypted(self._socket)
        buffers = [self._ready[i] for i in range(min(len(self._ready), MAX_BUFFERS))]
        try:
            count = self._socket.sendmsg(buffers)
        except BlockingIOError:
            return False
        self._ready_bytes -= count
        while count:
            first = self._ready[0]
            if count < len(first):
                self._ready[0] = first[count:]
                return False
            count -= len(first)
            self._ready.popleft()
        return True

    def _send_encrypted(self, connected: ssl.SSLSocket) -> bool:
        """OpenSSL takes one buffer at a time, and the same once more where it could not finish."""
        while self._record or self._ready:
            if not self._record:
                self._record = self._next_record()
            try:
                count = connected.send(self._record)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            self._ready_bytes -= count
            self._record = self._record[count:]
        return True

    def _next_record(self) -> memoryview:
        """What is ready, up to the size at which a copy into one buffer does not pay."""
        first = self._ready.popleft()
        if len(first) >= RECORD_BYTES:
            return first
        parts, size = [first], len(first)
        while self._ready and size + len(self._ready[0]) <= RECORD_BYTES:
            parts.append(self._ready.popleft())
            size += len(parts[-1])
        return memoryview(b"".join(parts)) if len(parts) > 1 else first
