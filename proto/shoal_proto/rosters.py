"""Rosters of any size.

Deflated, a roster of 10,000 members has 0.25 MB, and 0.5 MB with the members' incarnations. So a
roster is one value in etcd, and members that share a host fetch it once.
"""

import hashlib
import zlib
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from shoal_proto.deflated import inflate
from shoal_proto.errors import MalformedMessage
from shoal_proto.v1.membership_pb2 import Roster

LARGE_ENTRIES = 500
"""Larger rosters are fetched by digest, not sent with each notice."""
MAX_UNPACKED_BYTES = 32 * 1024 * 1024
LEVEL = 1
"""Higher levels do not shrink incarnations further."""

M = TypeVar("M", bound=Message)


def roster_digest(roster: Roster) -> str:
    """Return the SHA-256, in hex, of the roster's encoding: fields by number, map entries by key.

    Fields that this release does not know are encoded last. A later release gives new fields higher
    numbers, so members of both releases compute the same digest.
    """
    return hashlib.sha256(roster.SerializeToString(deterministic=True)).hexdigest()


def pack(message: Message) -> bytes:
    """Return the message's encoding, deflated (RFC 1950)."""
    return zlib.compress(message.SerializeToString(deterministic=True), LEVEL)


def unpack(kind: type[M], packed: bytes) -> M:
    """Return the message that was packed. Raises MalformedMessage."""
    try:
        return kind.FromString(inflate(packed, MAX_UNPACKED_BYTES))
    except (ValueError, DecodeError) as error:
        raise MalformedMessage(
            f"{len(packed)} bytes do not unpack as a {kind.DESCRIPTOR.name}",
            seen=str(error),
            expected=f"a deflated message of at most {MAX_UNPACKED_BYTES} bytes",
        ) from error
