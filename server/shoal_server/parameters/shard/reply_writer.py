"""How the values of a shard leave: copied out under its lock, into what its asker reads."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from shoal_proto import pieces
from shoal_proto.checksum import crc32

SEND_PIECE_BYTES = 1024 * 1024


class CopyOut(Protocol):
    """Takes the values of a part of a call, which lie in one buffer or several, one after the
    other; gives the messages that bring them, or tell of them. Called from any thread, under the
    shard's lock."""

    def __call__(self, shard_id: int, *values: memoryview) -> Sequence[bytes]: ...


class ReplyWriter(Protocol):
    """The way back of one call. Lives on the event loop."""

    async def await_room(self, shard_id: int) -> None:
        """Return once the values of a pulled shard may come."""
        ...

    def writer(self, shard_id: int, num_bytes: int) -> CopyOut:
        """What takes so many bytes of that shard."""
        ...

    def end_follows(self) -> None:
        """Nothing comes behind the replies that are given next: they may go with the call's end."""
        ...


def cut(values: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Offset and bytes of pieces of what lies in these buffers; none is in two of them."""
    start = 0
    for buffer in values:
        for at in range(0, len(buffer), SEND_PIECE_BYTES):
            yield start + at, buffer[at : at + SEND_PIECE_BYTES]
        start += len(buffer)


def in_messages(field: int) -> CopyOut:
    """Serialized messages around pieces, which are their field of that number."""

    def write(shard_id: int, *values: memoryview) -> Sequence[bytes]:
        # Each byte is copied once, out of the shard and into the message that leaves.
        return [
            pieces.encode(field, shard_id, start, (data,), crc32(data))
            for start, data in cut(values)
        ]

    return write


class MessageReplyWriter:
    """The way back of a gRPC call whose replies have pieces in this field."""

    def __init__(self, field: int) -> None:
        self._writer = in_messages(field)

    async def await_room(self, shard_id: int) -> None:
        """gRPC holds the stream up by itself."""

    def writer(self, shard_id: int, num_bytes: int) -> CopyOut:
        return self._writer

    def end_follows(self) -> None:
        """gRPC tells of the end by itself."""


PUSH_REPLIES = MessageReplyWriter(pieces.PUSH_REPLY)
SHARD_DATA = MessageReplyWriter(pieces.SHARD_DATA)
