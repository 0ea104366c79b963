"""How the values of a shard leave: copied out under its lock, into what its asker reads."""

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal_proto import pieces
from shoal_proto.checksum import crc32

SEND_PIECE_BYTES = 1024 * 1024

CopyOut = Callable[[int, memoryview], Sequence[bytes]]
"""Copies the values of the shard of that id; gives the messages that bring them, or tell of them.
Called from any thread, under the shard's lock."""


class ReplyWriter(Protocol):
    """The way back of one call. Lives on the event loop."""

    async def await_room(self, shard_id: int) -> None:
        """Return once the values of a pulled shard may come."""
        ...

    def writer(self, shard_id: int, num_bytes: int) -> CopyOut:
        """What takes so many bytes of that shard."""
        ...


def in_messages(field: int) -> CopyOut:
    """Serialized messages around pieces, which are their field of that number."""

    def write(shard_id: int, values: memoryview) -> Sequence[bytes]:
        # Each byte is copied once, out of the shard and into the message that leaves.
        messages = []
        for start in range(0, len(values), SEND_PIECE_BYTES):
            data = values[start : start + SEND_PIECE_BYTES]
            messages.append(pieces.encode(field, shard_id, start, (data,), crc32(data)))
        return messages

    return write


class MessageReplyWriter:
    """The way back of a gRPC call whose replies have pieces in this field."""

    def __init__(self, field: int) -> None:
        self._writer = in_messages(field)

    async def await_room(self, shard_id: int) -> None:
        """gRPC holds the stream up by itself."""

    def writer(self, shard_id: int, num_bytes: int) -> CopyOut:
        return self._writer


PUSH_REPLIES = MessageReplyWriter(pieces.PUSH_REPLY)
SHARD_DATA = MessageReplyWriter(pieces.SHARD_DATA)
