"""The digest by which members and coordinator know that they speak of the same roster."""

import hashlib
import json

from shoal_proto.v1.membership_pb2 import Roster


def roster_digest(roster: Roster) -> str:
    """SHA-256 in hex over the roster's canonical form: JSON with sorted keys, no white space.

    Protobuf's own encoding is no basis for it: the order of a map's entries is not fixed.
    """
    entries = [
        [e.member_id, e.incarnation, e.rank, e.host, e.address, int(e.state), e.step, e.probe_port]
        for e in roster.entries
    ]
    canonical = {
        "generation": roster.generation,
        "entries": entries,
        "source": roster.source_member_id,
        "step": roster.step,
        "planned": roster.planned,
        "synchronous": roster.synchronous,
        "fields": dict(roster.fields),
    }
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
