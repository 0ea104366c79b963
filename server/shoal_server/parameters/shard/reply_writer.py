"""Writers of replies: they copy a shard's values to messages, or to memory that the caller
reads."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from google.protobuf.message import Message

from shoal_proto.checksum import crc32
from shoal_proto.v1.parameters_pb2 import LookupReply, Piece, PushReply, ShardData

SEND_PIECE_BYTES = 1024 * 1024

ReplyType = type[PushReply] | type[ShardData] | type[LookupReply]


class CopyOut(Protocol):
    """Copies the values of a shard from buffers to the reply, in any thread, under the shard's
    lock. Returns messages or frames with the values, or with their position in the caller's
    memory."""

    def __call__(self, shard_id: int, *values: memoryview) -> Sequence[Message | bytes]: ...


class ReplyWriter(Protocol):
    """Writes the replies of one call. Lives on the event loop."""

    async def await_slot(self, shard_id: int) -> None:
        """Return once the values of a pulled shard may be sent."""
        ...

    def writer(self, shard_id: int, num_bytes: int) -> CopyOut:
        """Return the function that copies a shard."""
        ...

    def end_follows(self) -> None:
        """Note that the next replies are the last."""
        ...


def cut(values: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Cut buffers into pieces within one buffer each; yield each piece's offset and bytes."""
    start = 0
    for buffer in values:
        for at in range(0, len(buffer), SEND_PIECE_BYTES):
            yield start + at, buffer[at : at + SEND_PIECE_BYTES]
        start += len(buffer)


def in_messages(reply: ReplyType) -> CopyOut:
    """Return a writer of messages of this type, each with one piece."""

    def write(shard_id: int, *values: memoryview) -> Sequence[Message | bytes]:
        return [
            reply(
                piece=Piece(
                    shard_id=shard_id, offset_bytes=start, data=bytes(data), checksum=crc32(data)
                )
            )
            for start, data in cut(values)
        ]

    return write


class MessageReplyWriter:
    """Writes the replies of a gRPC call."""

    def __init__(self, reply: ReplyType) -> None:
        self._writer = in_messages(reply)

    async def await_slot(self, shard_id: int) -> None:
        """Return at once: gRPC has its own flow control."""

    def writer(self, shard_id: int, num_bytes: int) -> CopyOut:
        return self._writer

    def end_follows(self) -> None:
        """Do nothing: gRPC ends the call itself."""


PUSH_REPLIES = MessageReplyWriter(PushReply)
SHARD_DATA = MessageReplyWriter(ShardData)
LOOKUP_REPLIES = MessageReplyWriter(LookupReply)
