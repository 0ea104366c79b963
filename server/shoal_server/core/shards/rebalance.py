"""Who should hold which shard: the coordinator's wishes, written into the record. Pure.

One call looks at one job's record and gives the next one. It recruits where copies are missing,
empties servers that are to leave, evens out what each server leads, and lets surplus copies go. It
never takes away the last copy, and never more than a few shards move at a time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shoal_server.core.shards.assignments import (
    Holder,
    JobAssignments,
    ShardAssignment,
    ShardContent,
    promoted,
)

MAX_MOVES = 8
"""Shards that change servers for balance at a time: training goes on meanwhile."""
TOLERATED_SKEW = 1.05
"""Load of the fullest server over the mean, up to which nothing is moved."""


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers as the coordinator sees them."""

    present: frozenset[Holder]
    leaving: frozenset[Holder] = frozenset()
    """Those of the present that are to be emptied."""
    dead: frozenset[Holder] = frozenset()
    """Those known to be gone for good, with all that they held."""
    awaited: frozenset[Holder] = frozenset()
    """Those that are gone for so short a time that their shards are left to them."""
    suspects: frozenset[Holder] = frozenset()
    """Those of the present that another server has just gone on without: nothing is given to them
    until it is known whether they live."""
    disks: frozenset[str] = frozenset()
    """Ids of servers that may lead from their journals again, now or once they come back."""
    are_loading: bool = False
    """Whether the job is being restored: who restores it sees to the shards that are to be loaded,
    whatever becomes of their servers."""

    @cached_property
    def staying(self) -> frozenset[Holder]:
        return self.present - self.leaving

    @cached_property
    def takers(self) -> frozenset[Holder]:
        """Those that a shard may be given to."""
        return self.staying - self.suspects


@dataclass(slots=True)
class _Loads:
    """What each server leads and holds altogether, in the unit of the weights."""

    leads: Counter[Holder] = field(default_factory=Counter)
    holds: Counter[Holder] = field(default_factory=Counter)


def rebalance(
    assignments: JobAssignments, servers: Servers, weights: Mapping[int, int]
) -> JobAssignments:
    """The record as it should be next; equal to the one given where all is well.

    `weights` has the load of each shard, for instance its bytes; a missing one counts 1.
    """
    if not servers.staying:
        return assignments
    loads = _count(assignments, weights)
    shards = []
    wanted = _wanted(assignments.copies, servers)
    for assignment in assignments.shards:
        if _is_well(assignment, wanted, servers) or _is_loading(assignment, servers):
            # Most of thousands, each time that anything happens to one.
            shards.append(assignment)
            continue
        weight = weights.get(assignment.shard_id, 1)
        kept = _rescue(assignment, servers, loads, weight)
        if kept.content is ShardContent.LOST:
            shards.append(kept)
            continue
        kept = _recruit(kept, assignments.copies, servers, loads, weight)
        kept = _relieve(kept, assignments.copies, servers, loads, weight)
        shards.append(kept)
    tended = replace(assignments, shards=tuple(shards))
    if tended != assignments:
        return tended
    return _even_out(tended, servers, loads, weights)


def _is_well(assignment: ShardAssignment, wanted: int, servers: Servers) -> bool:
    """Whether nothing is to be done for a shard, whatever the loads."""
    in_step = (assignment.primary, *assignment.backups)
    return (
        assignment.joining is None
        and assignment.successor is None
        and len(in_step) == wanted
        and servers.staying.issuperset(in_step)
    )


def _is_loading(assignment: ShardAssignment, servers: Servers) -> bool:
    """Whether somebody else sees to a shard."""
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
    """A primary that is gone is replaced: by a backup, else by anybody, with nothing in hand, who
    tells that a shard that was trained is lost. A disk that comes back may still have it."""
    if assignment.joining is not None and assignment.joining not in servers.present:
        assignment = replace(assignment, joining=None)
    if assignment.primary in servers.present | servers.awaited:
        return assignment
    for backup in assignment.backups:
        if backup in servers.present:
            return promoted(assignment, assignment.primary, backup)
    # Who was to lead a lost shard had nothing of it: nobody waits for that server.
    if assignment.content is not ShardContent.LOST and not _is_lost(assignment, servers):
        return assignment
    if not servers.takers:
        return assignment
    heir = _emptiest(servers.takers, loads.leads)
    loads.leads[heir] += weight
    loads.holds[heir] += weight
    fresh = ShardAssignment(
        shard_id=assignment.shard_id,
        epoch=assignment.epoch + 1,
        primary=heir,
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


def num_lost(assignments: JobAssignments, servers: Servers) -> int:
    """Shards that had values which nobody has any more, and whose loss is not noted yet:
    `rebalance` gives them to servers that lack them, or a server has just found that its disk has
    them not."""
    if not servers.staying:
        return 0
    return sum(
        assignment.loss is None
        if assignment.content is ShardContent.LOST
        else _is_lost(assignment, servers)
        for assignment in assignments.shards
        if assignment.content is not ShardContent.NONE and not _is_loading(assignment, servers)
    )


def _wanted(copies: int, servers: Servers) -> int:
    return min(copies, len(servers.staying))


def _staying(assignment: ShardAssignment, servers: Servers) -> list[Holder]:
    in_step = (assignment.primary, *assignment.backups)
    return [holder for holder in in_step if holder in servers.staying]


def _recruit(
    assignment: ShardAssignment, copies: int, servers: Servers, loads: _Loads, weight: int
) -> ShardAssignment:
    """Name somebody to be brought in step where copies are missing."""
    missing = len(_staying(assignment, servers)) < _wanted(copies, servers)
    free = servers.takers - set(assignment.holders)
    if not missing or assignment.joining is not None or not free:
        return assignment
    joining = _emptiest(free, loads.holds)
    loads.holds[joining] += weight
    return replace(assignment, joining=joining)


def _relieve(
    assignment: ShardAssignment, copies: int, servers: Servers, loads: _Loads, weight: int
) -> ShardAssignment:
    """Hand over from a server that leaves; let a copy go that is one too many."""
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
        # A copy that was made to move the shard is first used for it.
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
    """Move some shards from the server that leads most to the one that leads least."""
    moving = sum(h.joining is not None or h.successor is not None for h in assignments.shards)
    chosen: dict[int, ShardAssignment] = {}
    if not servers.takers:
        return assignments
    for _ in range(MAX_MOVES - moving):
        fullest = max(sorted(servers.staying), key=lambda s: loads.leads[s])
        emptiest = _emptiest(servers.takers, loads.leads)
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
            # Anything larger would only swap the two.
            and weights.get(h.shard_id, 1) < gap
        ]
        if not candidates:
            break
        # Where the emptiest has a copy already, nothing need be sent.
        best = max(candidates, key=lambda h: (emptiest in h.backups, weights.get(h.shard_id, 1)))
        move = {"successor" if emptiest in best.backups else "joining": emptiest}
        chosen[best.shard_id] = replace(best, **move)  # type: ignore[arg-type]
        loads.leads[fullest] -= weights.get(best.shard_id, 1)
        loads.leads[emptiest] += weights.get(best.shard_id, 1)
    return replace(assignments, shards=tuple(chosen.get(h.shard_id, h) for h in assignments.shards))


def gone_on_without(before: JobAssignments, after: JobAssignments) -> frozenset[Holder]:
    """Those that held something, or were getting it, and that other servers have dropped since."""
    holders = {h.shard_id: h.holders for h in after.shards}
    return frozenset(
        holder
        for h in before.shards
        for holder in h.holders
        if holder not in holders.get(h.shard_id, h.holders)
    )


def _emptiest(holders: "frozenset[Holder] | list[Holder]", load: Counter[Holder]) -> Holder:
    return min(holders, key=lambda holder: (load[holder], holder))
