"""Conflicts name the first entry that differs, instead of digests of all entries."""

import pytest

from shoal_proto.listings import PackedListing, pack
from shoal_server.core.generations.conflicts import (
    MAX_CONFLICT_TEXT,
    find_conflicts,
    shorten_conflicts,
)
from shoal_server.core.generations.roster import Candidate, MemberInfo, Proposal
from shoal_server.core.membership import refusals

ENTRIES = ("parameter a.weight: (3, 4) float32", "parameter b.weight: (3,) float32", "tied c: a")


def member(name: str, schema: str, lines: tuple[str, ...] | None, **fields: str) -> Candidate:
    listings = {} if lines is None else {"schema": PackedListing(pack(lines))}
    proposal = Proposal(fields={"schema": schema, **fields}, listings=listings)
    return Candidate(member_id=name, incarnation=name, info=MemberInfo(), proposal=proposal)


def refusal_of(*members: Candidate) -> str:
    """Return the refusal that all these members get."""
    refusal = refusals.conflict("j", find_conflicts(members))
    return f"{refusal.seen}. {refusal.fix}"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            ("parameter a.weight: (3, 5) float32", *ENTRIES[1:]),
            "schema: 'parameter a.weight: (3, 4) float32' in w0, w2"
            " but 'parameter a.weight: (3, 5) float32' in w1",
        ),
        (
            (*ENTRIES[:2], "buffer b.mean: (3,) float32", ENTRIES[2]),
            "schema: 'buffer b.mean: (3,) float32' in w1 but 'tied c: a' in w0, w2",
        ),
        (
            ENTRIES[:2],
            "schema: 'nothing after parameter b.weight: (3,) float32' in w1"
            " but 'tied c: a' in w0, w2",
        ),
        ((), f"schema: 'nothing' in w1 but '{ENTRIES[0]}' in w0, w2"),
    ],
)
def test_the_first_entry_that_differs_is_named(other: tuple[str, ...], expected: str) -> None:
    """The refusal also has each member's entry at this position."""
    text = refusal_of(
        member("w0", "1", ENTRIES), member("w1", "2", other), member("w2", "1", ENTRIES)
    )
    assert text.startswith(f"{expected}. The scripts make models that differ"), text


def test_the_same_entries_in_another_order_are_reported_as_that() -> None:
    """The refusal names the usual cause, iteration over a set."""
    swapped = (ENTRIES[1], ENTRIES[0], ENTRIES[2])
    text = refusal_of(member("w0", "1", ENTRIES), member("w1", "2", swapped))
    assert f"'{ENTRIES[0]} (same entries in another order)' in w0" in text
    assert f"'{ENTRIES[1]} (same entries in another order)' in w1" in text
    assert "Do not iterate over a set" in text
    assert "same script" not in text


def test_members_with_the_same_first_differing_entry_are_named_together() -> None:
    first = (ENTRIES[1], *ENTRIES[1:])
    text = refusal_of(
        member("w0", "1", ENTRIES),
        member("w1", "2", (*first, "tied d: a")),
        member("w2", "3", first),
    )
    assert f"'{ENTRIES[1]}' in w1, w2" in text


@pytest.mark.parametrize("lines", [None, ENTRIES])
def test_values_are_shown_without_listings_that_differ(lines: tuple[str, ...] | None) -> None:
    """The other member sends no listing, or an equal one."""
    text = refusal_of(member("w0", "1", ENTRIES), member("w1", "2", lines))
    assert text.startswith("schema: '1' in w0 but '2' in w1.")


def test_an_unreadable_listing_is_ignored() -> None:
    odd = Proposal(fields={"schema": "2"}, listings={"schema": PackedListing(b"odd")})
    other = Candidate(member_id="w1", incarnation="w1", info=MemberInfo(), proposal=odd)
    assert refusal_of(member("w0", "1", ENTRIES), other).startswith(
        "schema: '1' in w0 but '2' in w1."
    )


def test_long_values_are_shown_where_they_differ() -> None:
    """Values that are too long for the refusal are cut around the place where they differ, and not
    to their equal beginnings."""
    settings = "rate=1 " * 1000
    text = refusal_of(
        member("w0", "1", None, optimizer=f"{settings}decay=0.1 {settings}"),
        member("w1", "1", None, optimizer=f"{settings}decay=0.2 {settings}"),
    )
    assert "decay=0.1" in text
    assert "decay=0.2" in text
    assert len(text) < 4 * MAX_CONFLICT_TEXT


def test_a_shortened_text_is_not_shortened_again() -> None:
    """Refusal and generation record show the same text."""
    words = "rate=1 " * 1000
    found = find_conflicts(
        [member("w0", f"{words}a{words}", None), member("w1", f"{words}b{words}", None)]
    )
    assert shorten_conflicts(shorten_conflicts(found)) == shorten_conflicts(found)
