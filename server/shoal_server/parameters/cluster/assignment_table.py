"""The table of shard assignments, as this server last saw them in etcd, and changes of them."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping

import structlog

from shoal_proto.errors import RetryError, ShoalError
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror

log = structlog.get_logger(__name__)

RETRY_PAUSE_S = 0.1


class AssignmentTable:
    """Follows every job's records. `on_change` is called with a job and its shards that have a
    newer record, `on_gone` with a job whose shards have no holder any more, or that is in another
    run by now."""

    def __init__(
        self,
        store: KeyValueStore,
        on_change: Callable[[str, Collection[int]], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._records = AssignmentMirror(store, on_change, on_gone)

    async def __aenter__(self) -> "AssignmentTable":
        await self._records.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._records.__aexit__(*exc)

    async def wait_failed(self) -> None:
        """Never return; raise what ended the watch."""
        await self._records.wait_failed()

    def assignment(self, job: str, shard_id: int) -> ShardAssignment | None:
        """The assignment of a shard."""
        return self._records.of_job(job).get(shard_id)

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        """The assignments of a job, by shard id."""
        return self._records.of_job(job)

    def run(self, job: str) -> str:
        """The run that the records of the job's shards belong to; empty: there are none."""
        return self._records.run(job)

    def job_run(self, job: str) -> str:
        """The run that the job's members are in; empty: its shards are not placed."""
        return self._records.job_run(job)

    @property
    def jobs(self) -> Iterator[str]:
        """Jobs whose shards are placed."""
        return self._records.jobs

    async def refresh(self, job: str, shard_ids: Collection[int] | None = None) -> None:
        """Read the records of these shards of a job anew, or of all its shards. Raises what the
        store raises."""
        await self._records.refresh(job, shard_ids)

    async def change(
        self,
        job: str,
        shard_ids: Collection[int],
        change: Callable[[ShardAssignment], ShardAssignment],
    ) -> bool:
        """Apply a change to each of these shards' records, with as many tries as etcd needs. True
        if the job's shards are still placed.

        Returns once each record was written, or the change does not apply: then `change` returns
        its argument. If another process writes a record meanwhile, only that record is decided
        again.
        """
        while True:
            try:
                return await self._records.change(job, shard_ids, change)
            except ShoalError as error:
                if not isinstance(error, RetryError) and error.details.get("outcome") != "unknown":
                    raise
                log.warning("assignments_not_changed", job=job, reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
