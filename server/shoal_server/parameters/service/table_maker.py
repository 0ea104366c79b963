"""Creation of table shards. A new table shard has no values, so its first primary makes it."""

from collections.abc import Iterable, Sequence
from functools import partial

import structlog

from shoal_proto.errors import ShoalError
from shoal_proto.v1.acknowledgement_pb2 import Acknowledgement
from shoal_proto.v1.shards_pb2 import Shard, ShardMap
from shoal_server.core.shards.assignments import ShardContent
from shoal_server.etcd.api import KeyValueStore
from shoal_server.parameters.replication.shard_replicas import ShardReplicas
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.replica import ReplicaRole, ShardReplica
from shoal_server.parameters.tables.shard import TableShard, new_table_shard

log = structlog.get_logger(__name__)

FORMING_S = 10.0


class TableMaker:
    """Makes table shards. Lives on the event loop."""

    def __init__(
        self, store: KeyValueStore, catalog: Catalog, replicas: ShardReplicas, memory: Memory
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._replicas = replicas
        self._memory = memory

    async def make_missing(self, job: str, wanted: Iterable[tuple[int, int]]) -> None:
        """Make the job's missing table shards if this server lacks one of the `wanted` (shard id,
        epoch), and knows of no later epoch. Raises Overloaded, or what the store raises."""
        for shard_id, epoch in wanted:
            if (
                self._catalog.find(job, shard_id) is None
                and self._catalog.redirect(job, shard_id, epoch) is None
            ):
                await self._make(job)
                return

    async def make_all(self, job: str) -> None:
        """Make the job's table shards that never existed and have this server as primary."""
        await self._make(job)

    async def _make(self, job: str) -> None:
        # A watch may lag, and only the recorded primary may make a shard.
        await self._replicas.refresh(job)
        layout = await self._catalog.layout(job)
        if layout is None:
            return
        new = []
        for spec in layout.shards:
            assignment = self._replicas.assignment(job, spec.shard_id)
            if not spec.table or assignment is None or assignment.primary != self._replicas.me:
                continue
            is_new = assignment.content is ShardContent.NONE
            if is_new and self._catalog.find(job, spec.shard_id) is None:
                shard = _new(spec, layout, assignment.epoch)
                new.append(ShardReplica(job, shard, ReplicaRole.PRIMARY, assignment.epoch))
        made = self._register(job, new) if new else []
        if made:
            log.info("table_shards_made", job=job, num_shards=len(made))
            await self._catalog.notify()
            await self._catalog.wait_for(job, made, FORMING_S)
            await self._wait_on_disk(job, made)

    def _register(self, job: str, new: Sequence[ShardReplica]) -> list[int]:
        num_bytes = sum(replica.state.memory_bytes for replica in new)
        with self._memory.reserve(num_bytes, f"{len(new)} new table shards of job {job}") as claim:
            for replica in new:
                self._catalog.add(replica)
                self._replicas.created(replica)
                claim.move_to_shard(replica.state.memory_bytes)
        return [replica.shard_id for replica in new]

    async def _wait_on_disk(self, job: str, made: Iterable[int]) -> None:
        """Wait until new shards are in the journal. If all servers died before that, the shards
        would be reported lost although nothing was pushed to them."""
        for replica in map(partial(self._catalog.find, job), made):
            if replica is None or not replica.is_journaled:
                continue
            try:
                await replica.leading.wait_acknowledged(
                    replica.state.version, Acknowledgement.ACKNOWLEDGEMENT_DURABLE
                )
            except ShoalError as error:
                log.warning("table_shard_not_on_disk", job=job, reason=str(error))


def _new(spec: Shard, layout: ShardMap, epoch: int) -> TableShard:
    table = next(table for table in layout.tables if table.name == spec.table)
    first = Shard()
    first.CopyFrom(spec)
    first.epoch = first.first_epoch = epoch
    return new_table_shard(first, table)
