"""Packing of many similar values.

In a Gloo group of N ranks, each rank sets a value of 154 + 8 N bytes, nearly the same for all
ranks, and reads all values. A packed value is its difference (exclusive or) from the value before
it, if both have the same length; all are deflated (RFC 1950).
"""

import zlib
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from shoal_proto.deflated import inflate
from shoal_proto.errors import MalformedMessage
from shoal_proto.v1.rendezvous_pb2 import StoreReply

LEVEL = 1
MAX_VALUES_BYTES = 128 * 1024 * 1024
"""Twice what a coordinator keeps for a generation."""


def pack(values: Sequence[bytes]) -> bytes:
    """Pack the values."""
    last = [b"", *values][: len(values)]
    differences = [_difference(value, before) for value, before in zip(values, last, strict=True)]
    return zlib.compress(StoreReply(values=differences).SerializeToString(), LEVEL)


def unpack(packed: bytes) -> list[bytes]:
    """Return the packed values. Raises MalformedMessage."""
    try:
        differences = StoreReply.FromString(inflate(packed, MAX_VALUES_BYTES)).values
    except (ValueError, DecodeError) as error:
        raise MalformedMessage(
            f"{len(packed)} bytes of packed values do not unpack",
            seen=str(error),
            expected=f"a deflated StoreReply of at most {MAX_VALUES_BYTES} bytes",
        ) from error
    values, before = [], b""
    for each in differences:
        before = _difference(each, before)
        values.append(before)
    return values


def _difference(value: bytes, other: bytes) -> bytes:
    """Return the exclusive or of two values of one length, else `value`; its own inverse."""
    size = len(value)
    if size != len(other):
        return value
    return (int.from_bytes(value, "little") ^ int.from_bytes(other, "little")).to_bytes(
        size, "little"
    )
