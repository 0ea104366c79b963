"""After a crash: leading again what only this server's journal still has."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial

import structlog

from shoal_server.core.holdings import Holder, Holding, Holdings
from shoal_server.etcd import holdings as records
from shoal_server.etcd import shard_map
from shoal_server.etcd.api import KeyValueStore
from shoal_server.parameters.custody import Custody
from shoal_server.parameters.held import Held, Role
from shoal_server.parameters.image import ShardState
from shoal_server.parameters.journal_replay import Recovered

log = structlog.get_logger(__name__)

LOOK_EACH_S = 0.2


async def reclaim(
    store: KeyValueStore,
    custody: Custody,
    recovered: Sequence[Recovered[ShardState]],
    within_s: float,
) -> Sequence[Recovered[ShardState]]:
    """Lead the shards of the journal that the last process of this server led and of which no
    backup in step is left; such a backup has more, and takes over by itself.

    To be called before this server is registered: from then on its last process is known to be
    gone, and others would be given its shards. Backups that etcd still lists may be dead as well:
    their leases are waited for, `within_s` at most. Gives the shards that are not led here, of
    which the journal may let go.
    """
    open_ones: dict[str, dict[int, Recovered[ShardState]]] = defaultdict(dict)
    for found in recovered:
        open_ones[found.job][found.state.shard_id] = found
    others: list[Recovered[ShardState]] = []
    give_up_s = asyncio.get_running_loop().time() + within_s
    while open_ones:
        present = frozenset(await shard_map.servers(store))
        is_over = asyncio.get_running_loop().time() >= give_up_s
        for job, shards in list(open_ones.items()):
            holdings = await _reclaimed(store, job, shards, custody.me, present)
            for shard_id, found in list(shards.items()):
                holding = holdings.find(shard_id) if holdings is not None else None
                if holding is not None and holding.primary == custody.me:
                    await custody.refresh(job)
                    await _lead(custody, found, holding)
                elif holding is None or not _is_ours(holding, custody.me) or is_over:
                    others.append(found)
                else:
                    continue
                del shards[shard_id]
            if not shards:
                del open_ones[job]
        if open_ones:
            await asyncio.sleep(LOOK_EACH_S)
    log.info("journal_recovered", num_led=len(recovered) - len(others), num_let_go=len(others))
    return others


async def _reclaimed(
    store: KeyValueStore,
    job: str,
    shard_ids: Collection[int],
    me: Holder,
    present: frozenset[Holder],
) -> Holdings | None:
    """The job's record once all is reclaimed that may be; None if there is none."""
    entry = await records.read(store, job)
    if entry is None:
        return None
    change: Callable[[Holding], Holding] = partial(_without_the_dead, me=me, present=present)
    changed = await records.change(
        store, entry, partial(Holdings.changed, shard_ids=shard_ids, change=change)
    )
    return None if changed is None else changed.holdings


def _without_the_dead(holding: Holding, me: Holder, present: frozenset[Holder]) -> Holding:
    if not _is_ours(holding, me) or any(backup in present for backup in holding.backups):
        return holding
    return Holding(shard_id=holding.shard_id, epoch=holding.epoch + 1, primary=me)


def _is_ours(holding: Holding, me: Holder) -> bool:
    """Whether the last process of this server led the shard."""
    return holding.primary.server_id == me.server_id and holding.primary != me


async def _lead(custody: Custody, found: Recovered[ShardState], holding: Holding) -> None:
    found.state.enter_epoch(holding.epoch)
    held = Held(found.job, found.state, Role.PRIMARY, holding.epoch)
    await custody.adopt(held)
    custody.created(held)
    log.info(
        "shard_reclaimed",
        job=found.job,
        shard_id=held.shard_id,
        version=found.state.version,
        num_replayed=found.num_replayed,
    )


__all__ = ["reclaim"]
