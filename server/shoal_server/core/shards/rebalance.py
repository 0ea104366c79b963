"""Placement decisions of the coordinator: one call maps a job's record to the next one.

It replaces primaries that are gone, adds missing copies, empties servers that leave, balances load,
and drops surplus copies. It never drops the last copy.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoal_server.core.processes import Holder
from shoal_server.core.shards.assignments import (
    JobAssignments,
    ShardAssignment,
    ShardContent,
    promote,
)

MAX_MOVES = 8
"""Maximum number of shards moved for balance at a time, while training goes on."""
TOLERATED_SKEW = 1.05
"""Load of the fullest server divided by the mean load, up to which nothing is moved."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    present: frozenset[Holder]
    leaving: frozenset[Holder] = frozenset()
    """Present servers that must be emptied."""
    dead: frozenset[Holder] = frozenset()
    """Servers gone for good, with all that they held."""
    awaited: frozenset[Holder] = frozenset()
    """Servers gone for a short time, which keep their shards."""
    suspects: frozenset[Holder] = frozenset()
    """Present servers that a peer has just dropped: they get no shards for now."""
    disks: frozenset[str] = frozenset()
    """Ids of servers that may lead shards from their journals, now or once they are back."""
    are_loading: bool = False
    """True if the job is being restored: the restore handles LOADING shards, even of lost
    servers."""

    @cached_property
    def staying(self) -> frozenset[Holder]:
        return self.present - self.leaving

    @cached_property
    def servers_for_shards(self) -> frozenset[Holder]:
        return self.staying - self.suspects


@dataclass(slots=True)
class _Loads:
    """Weights of the shards that each server leads (as primary or successor), and of all that it
    holds."""

    leads: Counter[Holder] = field(default_factory=Counter)
    holds: Counter[Holder] = field(default_factory=Counter)


def rebalance(
    assignments: JobAssignments, servers: Servers, weights: Mapping[int, int]
) -> JobAssignments:
    """The next record; equal to the given one if there is nothing to do. `weights`: load of each
    shard; a missing one counts 1."""
    if not servers.staying:
        return assignments
    loads = _count(assignments, weights)
    shards = []
    wanted = _wanted(assignments.copies, servers)
    for assignment in assignments.shards:
        if _needs_no_change(assignment, wanted, servers) or _is_loading(assignment, servers):
            # The common case: one shard changes, thousands do not.
            shards.append(assignment)
            continue
        weight = weights.get(assignment.shard_id, 1)
        kept = _rescue(assignment, servers, loads, weight)
        if kept.content is ShardContent.LOST:
            shards.append(kept)
            continue
        kept = _add_joining(kept, assignments.copies, servers, loads, weight)
        kept = _hand_over_or_drop(kept, assignments.copies, servers, loads, weight)
        shards.append(kept)
    changed = replace(assignments, shards=tuple(shards))
    if changed != assignments:
        return changed
    return _even_out(changed, servers, loads, weights)


def _needs_no_change(assignment: ShardAssignment, wanted: int, servers: Servers) -> bool:
    in_step = (assignment.primary, *assignment.backups)
    return (
        assignment.joining is None
        and assignment.successor is None
        and len(in_step) == wanted
        and servers.staying.issuperset(in_step)
    )


def _is_loading(assignment: ShardAssignment, servers: Servers) -> bool:
    return servers.are_loading and assignment.content is ShardContent.LOADING


def _count(assignments: JobAssignments, weights: Mapping[int, int]) -> _Loads:
    loads = _Loads()
    for assignment in assignments.shards:
        weight = weights.get(assignment.shard_id, 1)
        loads.leads[assignment.successor or assignment.primary] += weight
        for holder in assignment.holders:
            loads.holds[holder] += weight
    return loads


def _rescue(
    assignment: ShardAssignment, servers: Servers, loads: _Loads, weight: int
) -> ShardAssignment:
    """Replace a primary that is gone by a present backup.

    Without one, the shard waits until all its holders are dead and no disk is awaited. Then any
    server becomes primary without values, and a shard that had values is LOST. A disk that comes
    back may still hold the values.
    """
    if assignment.joining is not None and assignment.joining not in servers.present:
        assignment = replace(assignment, joining=None)
    if assignment.primary in servers.present | servers.awaited:
        return assignment
    for backup in assignment.backups:
        if backup in servers.present:
            return promote(assignment, assignment.primary, backup)
    # The primary of a lost shard has no values to wait for.
    if assignment.content is not ShardContent.LOST and not _is_lost(assignment, servers):
        return assignment
    if not servers.servers_for_shards:
        return assignment
    new_primary = _emptiest(servers.servers_for_shards, loads.leads)
    loads.leads[new_primary] += weight
    loads.holds[new_primary] += weight
    fresh = ShardAssignment(
        shard_id=assignment.shard_id,
        epoch=assignment.epoch + 1,
        primary=new_primary,
        accepted_loss=assignment.accepted_loss,
    )
    if assignment.content is ShardContent.NONE:
        return fresh
    return replace(
        fresh,
        content=ShardContent.LOST,
        on_disk=assignment.on_disk,
        disk_epoch=assignment.disk_epoch,
        disk_version=assignment.disk_version,
        found_version=assignment.found_version,
        found_foreign=assignment.found_foreign,
        restored_version=assignment.restored_version,
        loss=assignment.loss,
    )


def _is_lost(assignment: ShardAssignment, servers: Servers) -> bool:
    dead = {assignment.primary, *assignment.backups} <= servers.dead
    is_on_disk = assignment.on_disk in servers.disks and not assignment.found_version
    return dead and not is_on_disk


def newly_lost(assignments: JobAssignments, servers: Servers) -> frozenset[int]:
    """Ids of the shards whose values are gone without a recorded loss; empty if no server stays."""
    if not servers.staying:
        return frozenset()
    return frozenset(
        assignment.shard_id
        for assignment in assignments.shards
        if assignment.content is not ShardContent.NONE
        and not _is_loading(assignment, servers)
        and (
            assignment.loss is None
            if assignment.content is ShardContent.LOST
            else _is_lost(assignment, servers)
        )
    )


def _wanted(copies: int, servers: Servers) -> int:
    return min(copies, len(servers.staying))


def _staying(assignment: ShardAssignment, servers: Servers) -> list[Holder]:
    in_step = (assignment.primary, *assignment.backups)
    return [holder for holder in in_step if holder in servers.staying]


def _add_joining(
    assignment: ShardAssignment, copies: int, servers: Servers, loads: _Loads, weight: int
) -> ShardAssignment:
    missing = len(_staying(assignment, servers)) < _wanted(copies, servers)
    free = servers.servers_for_shards - set(assignment.holders)
    if not missing or assignment.joining is not None or not free:
        return assignment
    joining = _emptiest(free, loads.holds)
    loads.holds[joining] += weight
    return replace(assignment, joining=joining)


def _hand_over_or_drop(
    assignment: ShardAssignment, copies: int, servers: Servers, loads: _Loads, weight: int
) -> ShardAssignment:
    if assignment.joining is not None or assignment.successor is not None:
        return assignment
    staying = _staying(assignment, servers)
    if assignment.primary in servers.leaving and staying:
        successor = _emptiest(staying, loads.leads)
        loads.leads[assignment.primary] -= weight
        loads.leads[successor] += weight
        return replace(assignment, successor=successor)
    surplus = [b for b in assignment.backups if b in servers.leaving]
    if len(staying) > _wanted(copies, servers):
        surplus += sorted(
            (b for b in assignment.backups if b in servers.staying),
            key=lambda b: (-loads.holds[b], b),
        )[:1]
        # A surplus copy may have been made for a move: the move comes first.
        best = _emptiest(staying, loads.leads)
        if (
            best != assignment.primary
            and loads.leads[best] + weight < loads.leads[assignment.primary]
        ):
            loads.leads[assignment.primary] -= weight
            loads.leads[best] += weight
            return replace(assignment, successor=best)
    if not surplus or len(staying) < _wanted(copies, servers):
        return assignment
    for gone in surplus:
        loads.holds[gone] -= weight
    return replace(assignment, backups=tuple(b for b in assignment.backups if b not in surplus))


def _even_out(
    assignments: JobAssignments, servers: Servers, loads: _Loads, weights: Mapping[int, int]
) -> JobAssignments:
    moving = sum(h.joining is not None or h.successor is not None for h in assignments.shards)
    chosen: dict[int, ShardAssignment] = {}
    if not servers.servers_for_shards:
        return assignments
    for _ in range(MAX_MOVES - moving):
        fullest = max(sorted(servers.staying), key=lambda s: loads.leads[s])
        emptiest = _emptiest(servers.servers_for_shards, loads.leads)
        mean = sum(loads.leads[s] for s in servers.staying) / len(servers.staying)
        if loads.leads[fullest] <= TOLERATED_SKEW * mean:
            break
        gap = loads.leads[fullest] - loads.leads[emptiest]
        candidates = [
            h
            for h in assignments.shards
            if h.primary == fullest
            and h.shard_id not in chosen
            and h.joining is None
            and h.successor is None
            and h.content is not ShardContent.LOST
            # A larger shard would only make the other server the fullest.
            and weights.get(h.shard_id, 1) < gap
        ]
        if not candidates:
            break
        # A server with a copy need not be sent one.
        best = max(candidates, key=lambda h: (emptiest in h.backups, weights.get(h.shard_id, 1)))
        move = {"successor" if emptiest in best.backups else "joining": emptiest}
        chosen[best.shard_id] = replace(best, **move)  # type: ignore[arg-type]
        loads.leads[fullest] -= weights.get(best.shard_id, 1)
        loads.leads[emptiest] += weights.get(best.shard_id, 1)
    return replace(assignments, shards=tuple(chosen.get(h.shard_id, h) for h in assignments.shards))


def dropped_holders(before: JobAssignments, after: JobAssignments) -> frozenset[Holder]:
    """Servers dropped between the records from a shard that they held or were joining."""
    holders = {h.shard_id: h.holders for h in after.shards}
    return frozenset(
        holder
        for h in before.shards
        for holder in h.holders
        if holder not in holders.get(h.shard_id, h.holders)
    )


def _emptiest(holders: "frozenset[Holder] | list[Holder]", load: Counter[Holder]) -> Holder:
    return min(holders, key=lambda holder: (load[holder], holder))
