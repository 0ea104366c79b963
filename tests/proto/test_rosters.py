"""A roster's digest and packed form are the same for all members of all releases."""

import zlib

import pytest

from shoal_proto.deflated import MAX_UNPACKED_BYTES, pack, unpack
from shoal_proto.errors import MalformedMessage
from shoal_proto.rosters import roster_digest
from shoal_proto.v1 import membership_pb2 as pb

FIELDS = {"strategy": "ddp", "schema": "s1", "optimizer": "adamw", "seed": "7", "dätä": "é"}


def roster(fields: dict[str, str]) -> pb.Roster:
    entries = [
        pb.RosterEntry(
            member_id=name,
            public_id=f"i-{name}",
            rank=rank,
            host="h",
            address="10.0.0.1",
            state=pb.STATE_ACTION_KEEP,
            step=5,
            probe_port=7,
        )
        for rank, name in enumerate("ab")
    ]
    return pb.Roster(
        generation=3,
        entries=entries,
        source_member_id="a",
        step=5,
        planned=True,
        synchronous=True,
        fields=fields,
    )


def test_the_order_of_a_map_does_not_change_the_digest() -> None:
    """A process that fills in the fields in another order gets the same digest."""
    digests = {
        roster_digest(roster(dict(items)))
        for items in (list(FIELDS.items()), list(reversed(FIELDS.items())), sorted(FIELDS.items()))
    }
    assert len(digests) == 1


def test_a_received_roster_has_the_senders_digest() -> None:
    sent = roster(FIELDS)
    assert roster_digest(pb.Roster.FromString(sent.SerializeToString())) == roster_digest(sent)


def test_the_digest_is_fixed() -> None:
    """The digest of a roster is part of the protocol, and does not depend on a member's version of
    protobuf."""
    digest = "1cab775e729fd3c8c2cfb56f31bb8a2e85807567e63134ffe357e9e5c4653c5a"
    assert roster_digest(roster(FIELDS)) == digest


@pytest.mark.parametrize("field", [f.name for f in pb.RosterEntry.DESCRIPTOR.fields])
def test_every_field_of_an_entry_changes_the_digest(field: str) -> None:
    one, other = roster(FIELDS), roster(FIELDS)
    other.entries[1].ClearField(field)
    assert roster_digest(one) != roster_digest(other)


@pytest.mark.parametrize("field", [f.name for f in pb.Roster.DESCRIPTOR.fields])
def test_every_field_of_a_roster_changes_the_digest(field: str) -> None:
    one, other = roster(FIELDS), roster(FIELDS)
    other.ClearField(field)
    assert roster_digest(one) != roster_digest(other)


def test_a_packed_roster_is_restored() -> None:
    assert unpack(pb.Roster, pack(roster(FIELDS))) == roster(FIELDS)


def test_a_packed_roster_keeps_fields_of_a_later_release() -> None:
    """The digest covers these fields: a host may share the roster among members of two releases."""
    later = pb.Roster.FromString(roster(FIELDS).SerializeToString() + b"\x82\xf4\x03\x04next")
    assert roster_digest(unpack(pb.Roster, pack(later))) == roster_digest(later)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no deflated bytes",
        pack(roster(FIELDS))[:-1],
        zlib.compress(b"\xff no message"),
        zlib.compress(bytes(MAX_UNPACKED_BYTES + 1)),
    ],
    ids=["nothing", "plain", "cut off", "another message", "too large"],
)
def test_bytes_that_are_no_roster_are_refused(packed: bytes) -> None:
    with pytest.raises(MalformedMessage, match="do not unpack as a Roster"):
        unpack(pb.Roster, packed)
