"""Changes of shards between two records, in words."""

from collections import Counter
from collections.abc import Collection, Iterator

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent

Moves = Counter[tuple[str, str]]
"""Number of shards moved, by (from server, to server)."""


def changes_between(
    before: JobAssignments, after: JobAssignments, present: Collection[Holder]
) -> list[tuple[str, str]]:
    """Return kinds and texts of the servers lost and the copies gained, such as ("server_lost",
    "lost ps-1: ps-0 leads 4 shards in its place ..."). Handovers (see `moved`) and lost shards are
    left out, and so is a lost server whose shards are all lost. `present`: the registered
    servers."""
    promoted: dict[str, Counter[str]] = {}
    copies: Counter[str] = Counter()
    gained: Counter[str] = Counter()
    for old, new in _pairs(before, after):
        from_id, to_id = old.primary.server_id, new.primary.server_id
        if old.primary != new.primary and not _was_handed_over(old, new, present):
            promoted.setdefault(from_id, Counter())[to_id] += 1
        for holder in old.backups:
            if holder not in new.holders and holder not in present:
                copies[holder.server_id] += 1
        for holder in new.backups:
            if not old.holds(holder):
                gained[holder.server_id] += 1
    lines = [
        ("server_lost", _lost(server_id, promoted.get(server_id, Counter()), copies[server_id]))
        for server_id in sorted(promoted.keys() | copies.keys())
    ]
    lines += [
        ("shards_copied", f"{server_id} became a backup of {_shards(num)}")
        for server_id, num in sorted(gained.items())
    ]
    return lines


def moved(before: JobAssignments, after: JobAssignments, present: Collection[Holder]) -> Moves:
    return Counter(
        (old.primary.server_id, new.primary.server_id)
        for old, new in _pairs(before, after)
        if old.primary != new.primary and _was_handed_over(old, new, present)
    )


def _was_handed_over(
    old: ShardAssignment, new: ShardAssignment, present: Collection[Holder]
) -> bool:
    """True if the old primary is present, and is a backup now or had the new primary as successor.
    A killed server counts as present until its lease ends, so presence alone is not enough."""
    return old.primary in present and (new.holds(old.primary) or old.successor == new.primary)


def moves_in_words(moves: Moves) -> list[str]:
    return [
        f"{_shards(num)} moved from {from_id} to {to_id}"
        for (from_id, to_id), num in sorted(moves.items())
    ]


def _pairs(
    before: JobAssignments, after: JobAssignments
) -> Iterator[tuple[ShardAssignment, ShardAssignment]]:
    for old, new in zip(before.shards, after.shards, strict=False):
        if old.shard_id == new.shard_id and new.content is not ShardContent.LOST:
            yield old, new


def _lost(server_id: str, leaders: Counter[str], num_copies: int) -> str:
    parts = [f"{leader} leads {_shards(num)} in its place" for leader, num in leaders.items()]
    if parts:
        parts[-1] += (
            ", with every update that was acknowledged as replicated"
            " (as durable, if recovered from a journal)"
        )
    if num_copies:
        parts.append(f"copies of {_shards(num_copies)} have to be made again")
    return f"lost {server_id}: {'; '.join(parts)}"


def _shards(num: int) -> str:
    return f"{num} shard{'' if num == 1 else 's'}"
