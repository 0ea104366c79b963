"""After a crash: leading again, from this server's journal, what nobody else has in memory.

A shard's assignment names the server on whose disk it is (`ShardAssignment.on_disk`). Its last
process may have led the shard to the end; or a backup took over from it and ended too, before all
was on a disk of its own.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import structlog

from shoal_proto.errors import RetryError
from shoal_server.core.shards.absences import Absences
from shoal_server.core.shards.assignments import (
    Holder,
    ShardAssignment,
    led_from_disk,
    off_disk,
)
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import shard_map
from shoal_server.parameters.journal.replay import Recovered
from shoal_server.parameters.replication.shard_replicas import ShardReplicas
from shoal_server.parameters.shard.replica import Role, ShardReplica
from shoal_server.parameters.shard.versioned import AnyShard

log = structlog.get_logger(__name__)

LOOK_EACH_S = 0.2
LOOK_LATER_EACH_S = 1.0
GONE_AFTER_S = 30.0
"""A primary on another server that etcd has not heard of for so long is taken for dead."""

Key = tuple[str, int]


class JournalRecovery:
    """Lives on the event loop. What is in `recovered` is led here again, or the record comes to
    name another disk and the journal lets go of it (see `Journaling`)."""

    def __init__(
        self,
        store: KeyValueStore,
        replicas: ShardReplicas,
        recovered: Sequence[Recovered[AnyShard]],
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._open: dict[Key, Recovered[AnyShard]] = {
            (found.job, found.state.shard_id): found for found in recovered
        }
        self._absences = Absences[Holder]()
        """Of primaries whose server etcd does not list."""
        self._num_led = 0

    @property
    def num_open(self) -> int:
        """Shards in the journal that others may have."""
        return len(self._open)

    async def at_once(self, within_s: float) -> None:
        """Lead what the last process of this server led and of which no backup in step is left;
        such a backup has more, and takes over by itself.

        To be called before this server is registered: others see a shard come back then, and not
        one that nobody has. Backups that etcd still lists may be dead as well: their leases are
        waited for, `within_s` at most.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + within_s
        await disown(self._replicas, self._open)
        while True:
            await self._claim(await self._present(), dead=frozenset())
            if not any(map(self._is_own, self._open)) or loop.time() >= give_up_s:
                break
            await asyncio.sleep(LOOK_EACH_S)
        log.info("journal_recovered", num_led=self._num_led, num_open=self.num_open)

    async def later(self) -> None:
        """Go on for as long as others that had a shard may turn out to be gone."""
        while self._open:
            await asyncio.sleep(LOOK_LATER_EACH_S)
            try:
                present = await self._present()
                await self._claim(present, self._dead(present))
            except RetryError as error:
                log.warning("journal_not_compared", reason=str(error))

    async def _present(self) -> frozenset[Holder]:
        return frozenset(await shard_map.servers(self._store))

    def _is_own(self, key: Key) -> bool:
        assignment = self._replicas.assignment(*key)
        return (
            assignment is not None and assignment.primary.server_id == self._replicas.me.server_id
        )

    def _dead(self, present: frozenset[Holder]) -> frozenset[Holder]:
        """Primaries whose server has another process by now, or none for long."""
        ids = {holder.server_id for holder in present}
        assignments = (self._replicas.assignment(*key) for key in self._open)
        absent = {h.primary for h in assignments if h is not None and h.primary not in present}
        away_s = self._absences.away_s(absent, time.monotonic())
        return frozenset(
            holder
            for holder, for_s in away_s.items()
            if holder.server_id in ids or for_s >= GONE_AFTER_S
        )

    async def _claim(self, present: frozenset[Holder], dead: frozenset[Holder]) -> None:
        by_job: dict[str, list[int]] = defaultdict(list)
        for job, shard_id in self._open:
            by_job[job].append(shard_id)
        claim = partial(led_from_disk, server=self._replicas.me, present=present, dead=dead)
        for job, shard_ids in by_job.items():
            await self._replicas.change_assignments(job, shard_ids, claim)
            for shard_id in shard_ids:
                assignment = self._replicas.assignment(job, shard_id)
                if assignment is None or assignment.on_disk != self._replicas.me.server_id:
                    del self._open[job, shard_id]
                elif assignment.primary == self._replicas.me:
                    self._lead(self._open.pop((job, shard_id)), assignment)

    def _lead(self, found: Recovered[AnyShard], assignment: ShardAssignment) -> None:
        self._num_led += 1
        found.state.enter_epoch(assignment.epoch)
        replica = ShardReplica(found.job, found.state, Role.PRIMARY, assignment.epoch)
        self._replicas.adopt(replica)
        self._replicas.created(replica)
        log.info(
            "shard_recovered_from_journal",
            job=found.job,
            shard_id=replica.shard_id,
            version=found.state.version,
            num_replayed=found.num_replayed,
        )


async def disown(
    replicas: ShardReplicas, found: "Mapping[Key, object] | Collection[Key]" = ()
) -> None:
    """Say so in the records where this server's disk should have a shard and has it not: a disk
    that was lost, or a server that keeps no journal any more. Otherwise the shard is waited for."""
    gone = partial(off_disk, server=replicas.me)
    for job in replicas.jobs:
        missing = [
            shard_id
            for shard_id, assignment in replicas.of_job(job).items()
            if assignment.on_disk == replicas.me.server_id and (job, shard_id) not in found
        ]
        if missing:
            log.warning("shards_not_in_journal", job=job, num_shards=len(missing))
            await replicas.change_assignments(job, missing, gone)
