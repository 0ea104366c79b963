"""After a crash: leading again, from this server's journal, what nobody else has in memory.

What is claimed, and when, the replication core decides (`journal_claims.py` there); here etcd is
asked for what it has to know.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import structlog

from shoal_proto.errors import RetryError
from shoal_server.core.replication.backing.disowning import Disowning
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import ended_servers, shard_map
from shoal_server.parameters.journal.replay import Recovered
from shoal_server.parameters.replication.shard_replicas import ShardReplicas
from shoal_server.parameters.shard.versioned import AnyShard

log = structlog.get_logger(__name__)

LOOK_EACH_S = 0.2
LOOK_LATER_EACH_S = 1.0


class JournalRecovery:
    """Lives on the event loop."""

    def __init__(
        self, store: KeyValueStore, replicas: ShardReplicas, limits: ReplicationLimits
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._disowning = DiskDisowning(store, replicas, limits)

    async def at_once(self, found: Sequence[Recovered[AnyShard]], within_s: float) -> None:
        """Lead what the last process of this server led and of which no backup in step is left;
        such a backup has more, and takes over by itself.

        To be called before this server is registered: others see a shard come back then, and not
        one that nobody has. Backups that etcd still lists may be dead as well: their leases are
        waited for, `within_s` at most.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + within_s
        recovered = {(each.job, each.state.shard_id): each for each in found}
        await self._disowning.look(recovered)
        self._replicas.found_in_journal(recovered)
        jobs = set(self._replicas.jobs)
        num_known = sum(job in jobs for job, _ in recovered)
        while True:
            await self._look()
            if not any(map(self._is_own, self._replicas.open_claims)) or loop.time() >= give_up_s:
                break
            await asyncio.sleep(LOOK_EACH_S)
        num_open = len(self._replicas.open_claims)
        num_led = num_known - num_open
        log.info("journal_recovered", num_led=num_led, num_open=num_open)

    async def later(self) -> None:
        """Go on as long as this server runs: others that had a shard may turn out to be gone, of
        which this journal has something."""
        while True:
            await asyncio.sleep(LOOK_LATER_EACH_S)
            try:
                if self._replicas.open_claims:
                    await self._look()
                if not self._replicas.has_lost_disk:
                    await self._disowning.look(self._replicas.in_journal)
            except RetryError as error:
                log.warning("journal_not_compared", reason=str(error))

    async def _look(self) -> None:
        asked_s = asyncio.get_running_loop().time()
        present = frozenset(await shard_map.servers(self._store))
        self._replicas.servers_seen(present, asked_s, await ended_servers.read(self._store))

    def _is_own(self, key: Key) -> bool:
        assignment = self._replicas.assignment(*key)
        return (
            assignment is not None and assignment.primary.server_id == self._replicas.me.server_id
        )


class DiskDisowning:
    """Says so in the records where this server's disk should have a shard and has it not. Lives on
    the event loop."""

    def __init__(
        self, store: KeyValueStore, replicas: ShardReplicas, limits: ReplicationLimits
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._decision = Disowning(replicas.me, limits)

    async def look(self, on_disk: Collection[Key] = ()) -> None:
        """Compare what the journal has with the records. Raises what the store raises."""
        replicas, loop = self._replicas, asyncio.get_running_loop()
        asked_s = loop.time()
        missing = {
            job: {
                shard_id: assignment
                for shard_id, assignment in replicas.of_job(job).items()
                if assignment.on_disk == replicas.me.server_id and (job, shard_id) not in on_disk
            }
            for job in replicas.jobs
        }
        if not any(missing.values()):
            return
        present = frozenset(await shard_map.servers(self._store))
        ended = await ended_servers.read(self._store)
        known = [assignment for of_job in missing.values() for assignment in of_job.values()]
        self._decision.seen(known, present, ended, asked_s=asked_s, now_s=loop.time())
        for job, of_job in missing.items():
            wanted = {i: (a, self._decision.revised(a)) for i, a in of_job.items()}
            gone = {i: (a, new) for i, (a, new) in wanted.items() if new != a}
            if gone:
                log.warning("shards_not_in_journal", job=job, num_shards=len(gone))
                await replicas.change_assignments(job, gone, partial(_unless_changed, gone))

    async def look_for_ever(self) -> None:
        """As long as the server runs, for one without a journal: of a process that had its id and
        may be alive, it is known later that it is not."""
        while True:
            await asyncio.sleep(LOOK_LATER_EACH_S)
            try:
                await self.look()
            except RetryError as error:
                log.warning("journal_not_compared", reason=str(error))


def _unless_changed(
    wanted: Mapping[int, tuple[ShardAssignment, ShardAssignment]], found: ShardAssignment
) -> ShardAssignment:
    """Where somebody wrote the record since it was looked at, the disk may have the shard by now:
    it is looked at anew."""
    before, after = wanted[found.shard_id]
    return after if found == before else found
