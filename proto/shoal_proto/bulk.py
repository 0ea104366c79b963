"""Frames of the bulk transport to parameter servers and relays.

A connection carries one call at a time: first the frame of its request (PUSH, PULL, ...), then
other frames in both directions until END or ERROR. A frame is a header and a body. Pieces may also
lie in memory that both ends share.
"""

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from shoal_proto import CHUNK_BYTES, MAX_MESSAGE_BYTES, MAX_PIECE_BYTES
from shoal_proto.checksum import crc32, verify
from shoal_proto.errors import ChecksumMismatch, MalformedMessage

KEY_BYTES = 32
BEAT_S = 0.5
"""During a call, a server or relay that has sent nothing for this long sends BEAT. A server checks
at this interval."""
SILENCE_S = 3.0
"""Silence after which a server counts as dead."""
MAX_ARENA_BYTES = 192 * 1024 * 1024


class FrameKind(IntEnum):
    HELLO = 1
    """The key that was given over gRPC; the client asks for `at` bytes of shared memory. The answer
    holds the memory's size in `at`, with its descriptor attached; a size of 0: no memory."""
    PUSH = 2
    """A call: PushRequest with the header."""
    PULL = 3
    """A call: PullRequest."""
    PIECE = 4
    """`num_bytes` of a shard from `offset_bytes` on, in the body."""
    PLACED = 5
    """`num_bytes` of a shard from `offset_bytes` on, in shared memory at `at`. The sender does not
    change them until the receiver has answered."""
    FREE_SLOT = 6
    """Free shared memory. From a client: `num_bytes` at `at`, for the values of a shard. Between
    servers: the data at `at` were applied or copied."""
    END = 7
    """This end sends no further frames of this call."""
    MESSAGE = 8
    """A message of the call: PushReply, ShardData, LookupReply, FollowRequest, FollowReply,
    PutSegmentReply or FetchSegmentReply."""
    ERROR = 9
    """The call failed: ErrorDetail."""
    BEAT = 10
    """The server works on the call."""
    FOLLOW = 11
    """A server's call: `Follow` of the Replication service."""
    LOOKUP = 12
    """A call: LookupRequest with the header. In the pieces of this call, `shard_id` is the number
    of an item of the request."""
    SEGMENT_PUT = 13
    """A call: PutSegmentRequest. Chunks or a descriptor follow once the server asks for them."""
    SEGMENT_FETCH = 14
    """A call: FetchSegmentRequest."""
    CHUNK = 15
    """`num_bytes` of a segment from `offset_bytes` on, in the body, without a checksum: the
    segment's digests verify the bytes."""
    DESCRIPTOR = 16
    """A segment as a sealed memory file, with its descriptor attached to the header, over a Unix
    socket."""


_HEADER = struct.Struct("<BxxxIQQQI")
"""Kind, shard_id, offset_bytes, num_bytes, at, and CRC-32 of the body; the CRC-32 of these bytes
follows (`_CHECK`)."""
_CHECK = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECK.size
BUFFER_BYTES = 64 * 1024
_MAX_BODY_BYTES = {
    FrameKind.HELLO: KEY_BYTES,
    FrameKind.PUSH: MAX_MESSAGE_BYTES,
    FrameKind.PULL: MAX_MESSAGE_BYTES,
    FrameKind.PIECE: MAX_PIECE_BYTES,
    FrameKind.MESSAGE: MAX_MESSAGE_BYTES,
    FrameKind.ERROR: MAX_MESSAGE_BYTES,
    FrameKind.LOOKUP: MAX_MESSAGE_BYTES,
    FrameKind.SEGMENT_PUT: MAX_MESSAGE_BYTES,
    FrameKind.SEGMENT_FETCH: MAX_MESSAGE_BYTES,
    FrameKind.CHUNK: CHUNK_BYTES,
}
_MESSAGES = frozenset(
    {
        FrameKind.HELLO,
        FrameKind.PUSH,
        FrameKind.PULL,
        FrameKind.MESSAGE,
        FrameKind.ERROR,
        FrameKind.LOOKUP,
        FrameKind.SEGMENT_PUT,
        FrameKind.SEGMENT_FETCH,
    }
)
_EMPTY = memoryview(b"")


class Frame(NamedTuple):
    """Header and body of a frame. A message's checksum is verified, a piece's is not."""

    kind: FrameKind
    shard_id: int
    offset_bytes: int
    num_bytes: int
    at: int
    checksum: int
    body: memoryview


def header(
    kind: FrameKind,
    *,
    shard_id: int = 0,
    offset_bytes: int = 0,
    num_bytes: int = 0,
    at: int = 0,
    checksum: int = 0,
) -> bytes:
    """Return the header of a frame; a body of `num_bytes` follows, if the kind has one."""
    head = _HEADER.pack(kind, shard_id, offset_bytes, num_bytes, at, checksum)
    return head + _CHECK.pack(crc32(head))


def message(kind: FrameKind, serialized: bytes, *, shard_id: int = 0, at: int = 0) -> bytes:
    """Return a whole frame around a message."""
    size, checksum = len(serialized), crc32(serialized)
    head = header(kind, shard_id=shard_id, num_bytes=size, at=at, checksum=checksum)
    return head + serialized


def _new(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


class FrameReader:
    """Cuts received bytes into frames, without I/O: receive into `space()`, call `received()`, then
    take frames from `next()`."""

    def __init__(
        self, allocate: Callable[[int], memoryview] = _new, *, first: FrameKind | None = None
    ) -> None:
        """`allocate`: returns memory for the body of a piece or chunk. `first`: the only kind that
        the first frame may have, because the peer is not authenticated before it."""
        self._allocate = allocate
        self._first = first
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._stop = 0
        self._frame: Frame | None = None
        self._filled_bytes = 0

    def space(self) -> memoryview:
        """Return memory for the next received bytes; never empty. May move unread bytes: do not
        write to memory from earlier calls."""
        if self._frame is not None:
            return self._frame.body[self._filled_bytes :]
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == BUFFER_BYTES:
            unread = bytes(self._buffer[self._start : self._stop])
            self._buffer[: len(unread)] = unread
            self._start, self._stop = 0, len(unread)
        return self._buffer[self._stop :]

    def received(self, num_bytes: int) -> None:
        """Record that `num_bytes` were written to `space()`."""
        if self._frame is not None:
            self._filled_bytes += num_bytes
        else:
            self._stop += num_bytes

    def next(self) -> Frame | None:
        """Return the next whole frame; None until more is received. Raises MalformedMessage,
        ChecksumMismatch, or an error of `allocate`. After an error, close the connection.
        """
        if self._frame is None:
            if self._stop - self._start < HEADER_BYTES:
                return None
            self._frame = self._open(self._buffer[self._start : self._start + HEADER_BYTES])
            self._start += HEADER_BYTES
            body = self._frame.body
            here = min(len(body), self._stop - self._start)
            if here:
                body[:here] = self._buffer[self._start : self._start + here]
            self._start += here
            self._filled_bytes = here
        if self._filled_bytes < len(self._frame.body):
            return None
        frame, self._frame = self._frame, None
        if frame.kind in _MESSAGES:
            verify(f"a message of kind {frame.kind.name}", frame.checksum, frame.body)
        return frame

    def _open(self, head: memoryview) -> Frame:
        (check,) = _CHECK.unpack(head[_HEADER.size :])
        if crc32(head[: _HEADER.size]) != check:
            raise ChecksumMismatch(
                "the header of a frame changed in transit",
                seen=f"CRC-32 {crc32(head[: _HEADER.size]):#010x}",
                expected=f"{check:#010x}",
            )
        number, shard_id, offset_bytes, num_bytes, at, checksum = _HEADER.unpack_from(head)
        try:
            kind = FrameKind(number)
        except ValueError:
            raise MalformedMessage(
                "a frame of unknown kind", seen=str(number), expected=f"1 to {max(FrameKind)}"
            ) from None
        if self._first is not None and kind is not self._first:
            raise MalformedMessage(
                "a bulk connection begins with the wrong frame",
                seen=f"a frame of kind {kind.name}",
                expected=self._first.name,
            )
        if num_bytes > (limit := _MAX_BODY_BYTES.get(kind, MAX_ARENA_BYTES)):
            raise MalformedMessage(
                f"a frame of kind {kind.name} is too large",
                seen=f"{num_bytes} bytes",
                expected=f"at most {limit}",
            )
        self._first = None
        if kind is FrameKind.PIECE or kind is FrameKind.CHUNK:
            body = self._allocate(num_bytes)
        else:
            body = _new(num_bytes) if kind in _MESSAGES and num_bytes else _EMPTY
        return Frame(kind, shard_id, offset_bytes, num_bytes, at, checksum, body)
