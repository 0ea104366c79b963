"""Whether etcd could keep the record of a roster: asked before anybody is shown the roster."""

from shoal_server.coordinator.persistence import codec
from shoal_server.core.generations.roster import Record, Roster, Verdict

MAX_VALUE_BYTES = 1_400_000
"""etcd takes requests of 1.5 MiB, with the keys and what else is written in them."""
JSON_FACTOR = 6
"""No text has more bytes in JSON than that many times those it has in a message."""


def size_problem(roster: Roster) -> str:
    """What is too large about the roster's record; empty if nothing is."""
    if codec.is_large(roster):
        cut = codec.cut_of(roster)
        largest = max([2 * cut.head.ByteSize(), *map(len, cut.chunks.values())])
    else:
        largest = JSON_FACTOR * codec.roster_to_pb(roster).ByteSize()
        if largest > MAX_VALUE_BYTES:
            largest = len(codec.record_to_json(_record_of(roster)))
    if largest <= MAX_VALUE_BYTES:
        return ""
    return f"{largest} bytes in one value; etcd is given at most {MAX_VALUE_BYTES}"


def _record_of(roster: Roster) -> Record:
    """The record that would be written, but for a line of text."""
    return Record(
        job="",
        roster=roster,
        verdict=Verdict.COMMITTED,
        reason="",
        digest="",
        decided_s=0.0,
    )
