"""Changes of shard assignments in etcd, retried until they succeed."""

import asyncio
from collections.abc import Callable, Collection

import structlog

from shoal_proto.errors import RetryError, ShoalError
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror

log = structlog.get_logger(__name__)

RETRY_PAUSE_S = 0.1


async def change_assignments(
    records: AssignmentMirror,
    job: str,
    shard_ids: Collection[int],
    change: Callable[[ShardAssignment], ShardAssignment],
) -> bool:
    """Apply a change to each of these shards' records. Return True if the job's shards are still
    placed. Shards without a readable record are left out.

    `change` returns the new assignment, or its argument if nothing is to be changed. Returns once
    all changed records are written. If another process writes a record meanwhile, `change` is
    called again for the records of the same transaction. After a RetryError or an unknown outcome,
    `change` is called again for all records, however often that happens. Raises any other error of
    the store.
    """
    while True:
        try:
            return await records.change(job, shard_ids, change)
        except ShoalError as error:
            if not isinstance(error, RetryError) and error.details.get("outcome") != "unknown":
                raise
            log.warning("assignments_not_changed", job=job, reason=str(error))
            await asyncio.sleep(RETRY_PAUSE_S)
