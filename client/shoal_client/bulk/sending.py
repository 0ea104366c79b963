"""The sending half of a bulk call; never blocks."""

import socket
import ssl
from collections import deque
from collections.abc import Iterable, Iterator

from shoal_client.bulk.arena import Arena
from shoal_client.shards.parts import PIECE_BYTES, GradientPart
from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.checksum import crc32
from shoal_proto.pieces import Buffer

LOW_WATER_BYTES = 256 * 1024
"""Prepare more data below this amount. Data copied to shared memory counts, so that the server
begins with the first large part while the next one is copied."""
RECORD_BYTES = 16 * 1024
MAX_BUFFERS = 256
"""Buffers per call to the kernel; Linux takes at most 1024."""


class Sending:
    """The frames that one call sends."""

    def __init__(
        self,
        connected: socket.socket,
        opening: bytes,
        parts: Iterable[GradientPart],
        arena: Arena | None,
    ) -> None:
        self._socket = connected
        self._arena = arena
        self._ready: deque[memoryview] = deque()
        self._record = memoryview(b"")
        """Buffer that OpenSSL has begun to send."""
        self._ready_bytes = 0
        self._frames = self._all_frames(parts)
        self._is_over = False
        self._answered: set[int] = set()
        self._put(opening)

    @property
    def is_stuck(self) -> bool:
        """True if data is left that the kernel did not take."""
        return bool(self._ready or self._record)

    def record_answer(self, shard_id: int) -> None:
        """Record the server's answer for the shard. A part that has not begun is then not sent: the
        server has refused the part."""
        self._answered.add(shard_id)
        if self._arena is not None:
            self._arena.release(shard_id)

    def send_available(self) -> None:
        """Send until the kernel takes no more, no slot is free, or all is sent. Raises OSError if
        the connection broke."""
        while True:
            self._make_ready()
            if not self._ready or not self._send():
                return

    def send_between_answers(self) -> None:
        """Like `send_available`, but a broken connection raises only in the next `send_available`:
        answers that arrived before the break are read first."""
        try:
            self.send_available()
        except OSError:
            return

    def _make_ready(self) -> None:
        copied_before_bytes = self._copied_bytes
        while (
            not self._is_over
            and self._ready_bytes + self._copied_bytes - copied_before_bytes < LOW_WATER_BYTES
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

    def _all_frames(self, parts: Iterable[GradientPart]) -> Iterator[list[Buffer]]:
        """Yield buffers to send; an empty list while a part waits for a slot."""
        for part in parts:
            if self._arena is not None and self._arena.fits(part):
                while not self._arena.has_free_slot and part.shard_id not in self._answered:
                    yield []
                if part.shard_id not in self._answered:
                    yield list(self._arena.write_part(part))
                continue
            if part.shard_id in self._answered:
                continue
            if self._arena is not None:
                # No slot is large enough: the values are returned as pieces.
                yield [bulk.header(FrameKind.FREE_SLOT, shard_id=part.shard_id)]
            for offset_bytes, buffers in part.pieces(PIECE_BYTES):
                checksum = 0
                for buffer in buffers:
                    checksum = crc32(buffer, checksum)
                head = bulk.header(
                    FrameKind.PIECE,
                    shard_id=part.shard_id,
                    offset_bytes=offset_bytes,
                    num_bytes=sum(map(len, buffers)),
                    checksum=checksum,
                )
                yield [head, *buffers]
        yield [bulk.header(FrameKind.END)]

    def _put(self, buffer: Buffer) -> None:
        self._ready.append(memoryview(buffer))
        self._ready_bytes += len(buffer)

    def _send(self) -> bool:
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
        """OpenSSL must get the same buffer again after a send that would have blocked."""
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
        first = self._ready.popleft()
        if len(first) >= RECORD_BYTES:
            return first
        parts, size = [first], len(first)
        while self._ready and size + len(self._ready[0]) <= RECORD_BYTES:
            parts.append(self._ready.popleft())
            size += len(parts[-1])
        return memoryview(b"".join(parts)) if len(parts) > 1 else first
