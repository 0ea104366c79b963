"""Who should hold which shard: the coordinator's wishes, written into the record. Pure.

One call looks at one job's record and gives the next one. It recruits where copies are missing,
empties servers that are to leave, evens out what each server leads, and lets surplus copies go. It
never takes away the last copy, and never more than a few shards move at a time.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal_server.core.shards.assignments import Holder, Holding, Holdings, ShardContent, promoted

MAX_MOVES = 8
"""Shards that change servers for balance at a time: training goes on meanwhile."""
TOLERATED_SKEW = 1.05
"""Load of the fullest server over the mean, up to which nothing is moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The servers as the coordinator sees them."""

    present: frozenset[Holder]
    leaving: frozenset[Holder] = frozenset()
    """Those of the present that are to be emptied."""
    dead: frozenset[Holder] = frozenset()
    """Those known to be gone for good, with all that they held."""
    suspects: frozenset[Holder] = frozenset()
    """Those of the present that another server has just gone on without: nothing is given to them
    until it is known whether they live."""
    disks: frozenset[str] = frozenset()
    """Ids of servers that may lead from their journals again, now or once they come back."""

    @property
    def staying(self) -> frozenset[Holder]:
        return self.present - self.leaving

    @property
    def takers(self) -> frozenset[Holder]:
        """Those that a shard may be given to."""
        return self.staying - self.suspects


@dataclass(slots=True)
class _Loads:
    """What each server leads and holds altogether, in the unit of the weights."""

    leads: Counter[Holder] = field(default_factory=Counter)
    holds: Counter[Holder] = field(default_factory=Counter)


def upkeep(holdings: Holdings, servers: Servers, weights: Mapping[int, int]) -> Holdings:
    """The record as it should be next; equal to the one given where all is well.

    `weights` has the load of each shard, for instance its bytes; a missing one counts 1.
    """
    if not servers.staying:
        return holdings
    loads = _count(holdings, weights)
    shards = []
    for holding in holdings.shards:
        weight = weights.get(holding.shard_id, 1)
        kept = _rescue(holding, servers, loads, weight)
        if kept.content is ShardContent.LOST:
            shards.append(kept)
            continue
        kept = _recruit(kept, holdings.copies, servers, loads, weight)
        kept = _relieve(kept, holdings.copies, servers, loads, weight)
        shards.append(kept)
    tended = replace(holdings, shards=tuple(shards))
    if tended != holdings:
        return tended
    return _even_out(tended, servers, loads, weights)


def _count(holdings: Holdings, weights: Mapping[int, int]) -> _Loads:
    loads = _Loads()
    for holding in holdings.shards:
        weight = weights.get(holding.shard_id, 1)
        loads.leads[holding.successor or holding.primary] += weight
        for holder in holding.holders:
            loads.holds[holder] += weight
    return loads


def _rescue(holding: Holding, servers: Servers, loads: _Loads, weight: int) -> Holding:
    """A primary that is gone is replaced: by a backup, else by anybody, with nothing in hand, who
    tells that a shard that was trained is lost. A disk that comes back may still have it."""
    if holding.joining is not None and holding.joining not in servers.present:
        holding = replace(holding, joining=None)
    if holding.primary in servers.present:
        return holding
    for backup in holding.backups:
        if backup in servers.present:
            return promoted(holding, holding.primary, backup)
    if not _is_lost(holding, servers):
        return holding
    if not servers.takers:
        return holding
    heir = _emptiest(servers.takers, loads.leads)
    loads.leads[heir] += weight
    loads.holds[heir] += weight
    fresh = Holding(shard_id=holding.shard_id, epoch=holding.epoch + 1, primary=heir)
    if holding.content is ShardContent.NONE:
        return fresh
    return replace(fresh, content=ShardContent.LOST, on_disk=holding.on_disk)


def _is_lost(holding: Holding, servers: Servers) -> bool:
    dead = {holding.primary, *holding.backups} <= servers.dead
    return dead and holding.on_disk not in servers.disks


def num_lost(holdings: Holdings, servers: Servers) -> int:
    """Shards that nobody has any more; `upkeep` gives them to servers that have nothing of them."""
    if not servers.staying:
        return 0
    return sum(_is_lost(holding, servers) for holding in holdings.shards)


def _wanted(copies: int, servers: Servers) -> int:
    return min(copies, len(servers.staying))


def _staying(holding: Holding, servers: Servers) -> list[Holder]:
    in_step = (holding.primary, *holding.backups)
    return [holder for holder in in_step if holder in servers.staying]


def _recruit(
    holding: Holding, copies: int, servers: Servers, loads: _Loads, weight: int
) -> Holding:
    """Name somebody to be brought in step where copies are missing."""
    missing = len(_staying(holding, servers)) < _wanted(copies, servers)
    free = servers.takers - set(holding.holders)
    if not missing or holding.joining is not None or not free:
        return holding
    joining = _emptiest(free, loads.holds)
    loads.holds[joining] += weight
    return replace(holding, joining=joining)


def _relieve(
    holding: Holding, copies: int, servers: Servers, loads: _Loads, weight: int
) -> Holding:
    """Hand over from a server that leaves; let a copy go that is one too many."""
    if holding.joining is not None or holding.successor is not None:
        return holding
    staying = _staying(holding, servers)
    if holding.primary in servers.leaving and staying:
        successor = _emptiest(staying, loads.leads)
        loads.leads[holding.primary] -= weight
        loads.leads[successor] += weight
        return replace(holding, successor=successor)
    surplus = [b for b in holding.backups if b in servers.leaving]
    if len(staying) > _wanted(copies, servers):
        surplus += sorted(
            (b for b in holding.backups if b in servers.staying),
            key=lambda b: (-loads.holds[b], b),
        )[:1]
        # A copy that was made to move the shard is first used for it.
        best = _emptiest(staying, loads.leads)
        if best != holding.primary and loads.leads[best] + weight < loads.leads[holding.primary]:
            loads.leads[holding.primary] -= weight
            loads.leads[best] += weight
            return replace(holding, successor=best)
    if not surplus or len(staying) < _wanted(copies, servers):
        return holding
    for gone in surplus:
        loads.holds[gone] -= weight
    return replace(holding, backups=tuple(b for b in holding.backups if b not in surplus))


def _even_out(
    holdings: Holdings, servers: Servers, loads: _Loads, weights: Mapping[int, int]
) -> Holdings:
    """Move some shards from the server that leads most to the one that leads least."""
    moving = sum(h.joining is not None or h.successor is not None for h in holdings.shards)
    chosen: dict[int, Holding] = {}
    if not servers.takers:
        return holdings
    for _ in range(MAX_MOVES - moving):
        fullest = max(sorted(servers.staying), key=lambda s: loads.leads[s])
        emptiest = _emptiest(servers.takers, loads.leads)
        mean = sum(loads.leads[s] for s in servers.staying) / len(servers.staying)
        if loads.leads[fullest] <= TOLERATED_SKEW * mean:
            break
        gap = loads.leads[fullest] - loads.leads[emptiest]
        candidates = [
            h
            for h in holdings.shards
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
    return replace(holdings, shards=tuple(chosen.get(h.shard_id, h) for h in holdings.shards))


def gone_on_without(before: Holdings, after: Holdings) -> frozenset[Holder]:
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
