"""The digest by which members and coordinator know that they speak of the same roster."""

import hashlib

from shoal_proto.v1.membership_pb2 import Roster


def roster_digest(roster: Roster) -> str:
    """SHA-256 in hex over the roster's encoding, fields by number and map entries by key.

    Protobuf leaves the order of a map's entries open unless asked for a deterministic one. Members
    and coordinator have the same message type: another protocol version is refused when a member
    attends.
    """
    return hashlib.sha256(roster.SerializeToString(deterministic=True)).hexdigest()
