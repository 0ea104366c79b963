"""Writer of assignments that the core changes."""

import asyncio
from collections import defaultdict
from functools import partial

import structlog

from shoal_proto.errors import ShoalError
from shoal_server.core.replication.protocol.effects import (
    RefreshShardRecord,
    ReviseShardRecord,
    WriteShardRecord,
)
from shoal_server.core.replication.protocol.events import (
    ShardRecordNotWritten,
    ShardRecordRead,
    ShardRecordRefreshed,
    ShardRecordWritten,
)
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror
from shoal_server.parameters.replication.core_driver import CoreDriver
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)

AGAIN_S = 2.0


class RecordWriter:
    def __init__(self, driver: CoreDriver, records: AssignmentMirror) -> None:
        self._driver = driver
        self._records = records
        self._wanted: defaultdict[str, set[int]] = defaultdict(set)
        self._revised_records: dict[Key, ShardAssignment] = {}
        self._tasks = SupervisedTasks()

    async def close(self) -> None:
        await self._tasks.close()

    def write_shard_record(self, effect: WriteShardRecord) -> None:
        job, shard_id = effect.key
        if job not in self._wanted:
            # Changes of this turn of the event loop are written together.
            asyncio.get_running_loop().call_soon(self._start, job)
        self._wanted[job].add(shard_id)

    def _start(self, job: str) -> None:
        self._tasks.start(self._change(job, self._wanted.pop(job)))

    async def _change(self, job: str, shard_ids: set[int]) -> None:
        try:
            change = partial(self._revised, job)
            await self._records.change_until_written(job, shard_ids, change)
        except ShoalError as error:
            # Tried again later: an operator may correct this server's permissions in etcd.
            log.error("assignments_not_changed", job=job, reason=str(error))
            for shard_id in sorted(shard_ids):
                self._driver.submit_event(ShardRecordNotWritten((job, shard_id)))
            await asyncio.sleep(AGAIN_S)
        for shard_id in sorted(shard_ids):
            self._driver.submit_event(ShardRecordWritten((job, shard_id)))

    def _revised(self, job: str, assignment: ShardAssignment) -> ShardAssignment:
        key = job, assignment.shard_id
        # The core answers at once, with `ReviseShardRecord`.
        self._driver.submit_event(ShardRecordRead(key, assignment))
        return self._revised_records.pop(key)

    def revise_shard_record(self, effect: ReviseShardRecord) -> None:
        self._revised_records[effect.key] = effect.assignment

    def refresh_shard_record(self, effect: RefreshShardRecord) -> None:
        self._tasks.start(self._refresh(effect.key))

    async def _refresh(self, key: Key) -> None:
        try:
            await self._records.refresh(key[0], (key[1],))
        except ShoalError as error:
            log.warning("assignments_not_read", job=key[0], reason=str(error))
        self._driver.submit_event(ShardRecordRefreshed(key))
