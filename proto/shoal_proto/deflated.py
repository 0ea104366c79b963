"""Deflated bytes and messages (RFC 1950), from a peer or store that is not trusted."""

import zlib
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from shoal_proto.errors import MalformedMessage

MAX_UNPACKED_BYTES = 32 * 1024 * 1024
LEVEL = 1
"""Higher levels hardly make a roster smaller: its incarnations are random."""

M = TypeVar("M", bound=Message)


def pack(message: Message) -> bytes:
    """Return the message's encoding, deflated."""
    return zlib.compress(message.SerializeToString(deterministic=True), LEVEL)


def unpack(kind: type[M], packed: bytes, max_bytes: int = MAX_UNPACKED_BYTES) -> M:
    """Return the message that was packed. Raises MalformedMessage, also if the message has more
    than `max_bytes`."""
    try:
        return kind.FromString(inflate(packed, max_bytes))
    except (ValueError, DecodeError) as error:
        raise MalformedMessage(
            f"{len(packed)} bytes do not unpack as a {kind.DESCRIPTOR.name}",
            seen=str(error),
            expected=f"a deflated message of at most {max_bytes} bytes",
        ) from error


def inflate(packed: bytes, max_bytes: int) -> bytes:
    """Return what was deflated. Raises ValueError if the bytes are not deflated, are cut off, or
    inflate to more than `max_bytes`."""
    inflating = zlib.decompressobj()
    try:
        # At a limit of `max_bytes`, exactly that many bytes would leave the end mark unread.
        data = inflating.decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not inflating.eof or len(data) > max_bytes:
        raise ValueError(f"bytes that are cut off, or inflate to more than {max_bytes} bytes")
    return data
