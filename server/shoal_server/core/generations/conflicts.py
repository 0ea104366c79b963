"""Fields in which members' proposals differ."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from shoal_server.core.generations.roster import Candidate, Conflict, DigestListing

MAX_CONFLICTS = 16
MAX_CONFLICT_VALUES = 8
MAX_CONFLICT_TEXT = 200
MAX_HOLDERS = 16
MAX_LISTINGS = 4
"""Maximum number of a field's values whose listings are compared."""
_CONTEXT_CHARACTERS = 80
"""Characters shown before the first difference of long values."""
ANOTHER_ORDER = (
    "The members have the same names in another order. Do not iterate over a set: strings are in"
    " another order in each process. Use a list, or sorted(...); PYTHONHASHSEED=0 for all workers"
    " makes the order of sets the same."
)


def find_conflicts(candidates: Sequence[Candidate]) -> tuple[Conflict, ...]:
    """Return the fields in which the candidates differ: required ones first, sorted by name. All
    values are listed, since none is known to be right.

    A missing required field is "(absent)"; an optional one is compared among those that state it.
    If a field has a listing (the entries behind its digest), the first differing entry is shown.
    """
    conflicts = []
    for name in sorted({name for c in candidates for name in c.proposal.fields}):
        conflicts += _conflict(
            name, ((c.member_id, c.proposal.fields.get(name, "(absent)")) for c in candidates)
        )
    for name in sorted({name for c in candidates for name in c.proposal.optional_fields}):
        stated = ((c.member_id, c.proposal.optional_fields.get(name)) for c in candidates)
        conflicts += _conflict(name, ((who, value) for who, value in stated if value is not None))
    listings = {c.member_id: c.proposal.listings for c in candidates}
    return tuple(_located(each, listings) for each in conflicts)


def _conflict(field: str, stated: Iterable[tuple[str, str]]) -> list[Conflict]:
    holders: dict[str, list[str]] = {}
    for member_id, value in stated:
        holders.setdefault(value, []).append(member_id)
    if len(holders) < 2:
        return []
    values = tuple((value, tuple(sorted(who))) for value, who in sorted(holders.items()))
    return [Conflict(field=field, values=values)]


def _located(conflict: Conflict, listings: Mapping[str, Mapping[str, DigestListing]]) -> Conflict:
    """Replace each value by the first entry in which the listings differ, if they are readable.
    Values after the first MAX_LISTINGS stay."""
    listed: list[tuple[Sequence[str], tuple[str, ...]]] = []
    for _, holders in conflict.values[:MAX_LISTINGS]:
        listing = next((each for m in holders if (each := listings[m].get(conflict.field))), None)
        lines = listing.lines() if listing is not None else None
        if lines is None:
            return conflict
        listed.append((lines, holders))
    line_number = _first_difference([lines for lines, _ in listed])
    if line_number is None:
        return conflict
    entries: dict[str, tuple[str, ...]] = {}
    for lines, holders in listed:
        entry = _entry(lines, line_number)
        entries[entry] = (*entries.get(entry, ()), *holders)
    located = [(entry, tuple(sorted(holders))) for entry, holders in entries.items()]
    is_reordered = len({tuple(sorted(lines)) for lines, _ in listed}) == 1
    if is_reordered:
        located = [(f"{entry} (same entries in another order)", who) for entry, who in located]
    rest = conflict.values[MAX_LISTINGS:]
    return replace(
        conflict, values=(*sorted(located), *rest), fix=ANOTHER_ORDER if is_reordered else ""
    )


def _first_difference(sequences: Sequence[Sequence[Any]]) -> int | None:
    rows = enumerate(zip_longest(*sequences))
    return next((line_number for line_number, row in rows if len(set(row)) > 1), None)


def _entry(lines: Sequence[str], line_number: int) -> str:
    if line_number < len(lines):
        return lines[line_number]
    return f"nothing after {lines[-1]}" if lines else "nothing"


def shorten_conflicts(conflicts: Sequence[Conflict]) -> tuple[Conflict, ...]:
    """Shorten the conflicts to fit into a record."""
    return tuple(
        replace(
            conflict,
            field=conflict.field[:MAX_CONFLICT_TEXT],
            values=tuple(
                (value, (*who[:MAX_HOLDERS], *_and_more(who)))
                for value, who in _cut(conflict.values[:MAX_CONFLICT_VALUES])
            ),
        )
        for conflict in conflicts[:MAX_CONFLICTS]
    )


def _cut(
    values: Sequence[tuple[str, tuple[str, ...]]],
) -> Iterable[tuple[str, tuple[str, ...]]]:
    if all(len(value) <= MAX_CONFLICT_TEXT for value, _ in values):
        yield from values
        return
    start = max((_first_difference([v for v, _ in values]) or 0) - _CONTEXT_CHARACTERS, 0)
    for value, who in values:
        end = start + MAX_CONFLICT_TEXT - 2 * len("...")
        yield f"{'...' * (start > 0)}{value[start:end]}{'...' * (len(value) > end)}", who


def _and_more(who: Sequence[str]) -> tuple[str, ...]:
    num_more = len(who) - MAX_HOLDERS
    return (f"and {num_more} more",) if num_more > 0 else ()
