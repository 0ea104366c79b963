"""Recovery after a crash: this server leads shards of its journal that no server has in memory.

The replication core decides which shards to claim, and when (`journal_claims.py`). This module
tells it which servers etcd lists, and which have ended.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import structlog

from shoal_proto.errors import RetryError
from shoal_server.core.replication.backing.missing_shards import DiskRemoval
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records import ended_servers, shard_map
from shoal_server.parameters.journal.replay import RecoveredShard
from shoal_server.parameters.replication.shard_replicas import ShardReplicas
from shoal_server.parameters.shard.versioned import AnyShard

log = structlog.get_logger(__name__)

LOOK_EACH_S = 0.2
LOOK_LATER_EACH_S = 1.0


class JournalRecovery:
    """Reports servers to the core while shards of the journal are not claimed."""

    def __init__(
        self, store: KeyValueStore, replicas: ShardReplicas, limits: ReplicationLimits
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._removal = DiskRemovalLoop(store, replicas, limits)

    async def at_once(self, shards: Sequence[RecoveredShard[AnyShard]], within_s: float) -> None:
        """Become primary of the shards that this server's previous process led, if no backup in
        step is left. Such a backup may have later versions, and becomes primary itself.

        Call it before the registration, so that other servers see no recovered shard without a
        primary. Waits at most `within_s` until the leases of backups that etcd still lists have
        ended. Raises what the store raises.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + within_s
        recovered = {(each.job, each.state.shard_id): each for each in shards}
        await self._removal.correct_assignments(recovered)
        self._replicas.adopt_journaled(recovered)
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

    async def claim_later(self) -> None:
        """Claim shards for ever, each once all other servers that had it are known to be dead."""
        while True:
            await asyncio.sleep(LOOK_LATER_EACH_S)
            try:
                if self._replicas.open_claims:
                    await self._look()
                if not self._replicas.has_lost_disk:
                    await self._removal.correct_assignments(self._replicas.in_journal)
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


class DiskRemovalLoop:
    def __init__(
        self, store: KeyValueStore, replicas: ShardReplicas, limits: ReplicationLimits
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._decision = DiskRemoval(replicas.me, limits)

    async def correct_assignments(self, on_disk: Collection[Key] = ()) -> None:
        """Correct assignments that name this disk for a shard that is not in `on_disk`. Leave those
        whose primary is another process of this server that may be alive. Raises what the store
        raises."""
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
        self._decision.note_servers(known, present, ended, asked_s=asked_s, now_s=loop.time())
        for job, of_job in missing.items():
            wanted = {i: (a, self._decision.wanted_record(a)) for i, a in of_job.items()}
            revised = {i: (a, new) for i, (a, new) in wanted.items() if new != a}
            if revised:
                log.warning("shards_not_in_journal", job=job, num_shards=len(revised))
                await replicas.change_assignments(job, revised, partial(_unless_changed, revised))

    async def correct_for_ever(self) -> None:
        """Repeat `correct_assignments` for ever. For a server without a journal: the previous
        process may be alive at first, and known to be dead later."""
        while True:
            await asyncio.sleep(LOOK_LATER_EACH_S)
            try:
                await self.correct_assignments()
            except RetryError as error:
                log.warning("journal_not_compared", reason=str(error))


def _unless_changed(
    wanted: Mapping[int, tuple[ShardAssignment, ShardAssignment]], current: ShardAssignment
) -> ShardAssignment:
    """The corrected assignment, or `current` if that has changed since: the disk may have the shard
    now."""
    before, after = wanted[current.shard_id]
    return after if current == before else current
