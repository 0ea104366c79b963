"""Rosters of any size.

Deflated, a roster of 10,000 members has 0.25 MB, and 0.5 MB with the members' incarnations. So a
roster is one value in etcd, and members that share a host fetch it once.
"""

import hashlib

from shoal_proto.v1.membership_pb2 import Roster

LARGE_ENTRIES = 500
"""Larger rosters are fetched by digest, not sent with each notice."""


def roster_digest(roster: Roster) -> str:
    """Return the SHA-256, in hex, of the roster's encoding: fields by number, map entries by key.

    Fields that this release does not know are encoded last. A later release gives new fields higher
    numbers, so members of both releases compute the same digest.
    """
    return hashlib.sha256(roster.SerializeToString(deterministic=True)).hexdigest()
