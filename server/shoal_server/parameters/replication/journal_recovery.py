"""After a crash: leading again, from this server's journal, what nobody else has in memory.

What is claimed, and when, the replication core decides (`journal_claims.py` there); here etcd is
asked for what it has to know.
"""

import asyncio
from collections.abc import Collection, Sequence
from functools import partial

import structlog

from shoal_proto.errors import RetryError
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import off_disk
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
        self,
        store: KeyValueStore,
        replicas: ShardReplicas,
        recovered: Sequence[Recovered[AnyShard]],
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._recovered = {(found.job, found.state.shard_id): found for found in recovered}

    async def at_once(self, within_s: float) -> None:
        """Lead what the last process of this server led and of which no backup in step is left;
        such a backup has more, and takes over by itself.

        To be called before this server is registered: others see a shard come back then, and not
        one that nobody has. Backups that etcd still lists may be dead as well: their leases are
        waited for, `within_s` at most.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + within_s
        await disown(self._store, self._replicas, self._recovered)
        self._replicas.found_in_journal(self._recovered)
        while True:
            await self._look()
            if not any(map(self._is_own, self._replicas.open_claims)) or loop.time() >= give_up_s:
                break
            await asyncio.sleep(LOOK_EACH_S)
        num_open = len(self._replicas.open_claims)
        num_led = len(self._recovered) - num_open
        log.info("journal_recovered", num_led=num_led, num_open=num_open)

    async def later(self) -> None:
        """Go on as long as this server runs: others that had a shard may turn out to be gone, of
        which this journal has something."""
        while True:
            await asyncio.sleep(LOOK_LATER_EACH_S)
            try:
                if self._replicas.open_claims:
                    await self._look()
                await disown(self._store, self._replicas, self._replicas.in_journal)
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


async def disown(
    store: KeyValueStore, replicas: ShardReplicas, found: Collection[Key] = ()
) -> None:
    """Say so in the records where this server's disk should have a shard and has it not: a disk
    that was lost, or a server that keeps no journal any more. Otherwise the shard is waited for.

    Not of what a process of this id leads that may be alive: its disk may be another one. Raises
    what the store raises.
    """
    missing = {
        job: {
            shard_id: assignment.primary
            for shard_id, assignment in replicas.of_job(job).items()
            if assignment.on_disk == replicas.me.server_id and (job, shard_id) not in found
        }
        for job in replicas.jobs
    }
    if not any(missing.values()):
        return
    ended = await ended_servers.read(store)
    for job, primaries in missing.items():
        gone = [
            shard_id
            for shard_id, primary in primaries.items()
            if primary.server_id != replicas.me.server_id or primary in ended
        ]
        if gone:
            log.warning("shards_not_in_journal", job=job, num_shards=len(gone))
            await replicas.change_assignments(job, gone, partial(off_disk, server=replicas.me))


async def disown_for_ever(store: KeyValueStore, replicas: ShardReplicas) -> None:
    """The same for a server without a journal, as long as it runs: of a process that had its id
    and may be alive, it is known later that it is not."""
    while True:
        await asyncio.sleep(LOOK_LATER_EACH_S)
        try:
            await disown(store, replicas)
        except RetryError as error:
            log.warning("journal_not_compared", reason=str(error))
