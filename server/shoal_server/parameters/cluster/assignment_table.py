"""Which server has which shard of each job, as this server last saw it in etcd, and changing it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import structlog

from shoal_proto.errors import RetryError
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore
from shoal_server.etcd.mirror import Item, PrefixMirror
from shoal_server.etcd.records import assignments as records

log = structlog.get_logger(__name__)

RETRY_PAUSE_S = 0.1


class AssignmentTable:
    """Follows every job's record. `on_change` is called with the job of each newer record, and
    `on_gone` with that of one that was taken away, or that is of another run by now."""

    def __init__(
        self,
        store: KeyValueStore,
        on_change: Callable[[str], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._store = store
        self._on_change = on_change
        self._on_gone = on_gone
        self._records: PrefixMirror[records.StoredAssignments] = PrefixMirror(
            store,
            keys.ASSIGNMENTS,
            records.parse,
            on_put=self._put,
            on_delete=lambda job, old: self._forget(job),
        )
        self._assignments: dict[str, dict[int, ShardAssignment]] = {}

    async def __aenter__(self) -> "AssignmentTable":
        await self._records.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._records.__aexit__(*exc)

    async def wait_failed(self) -> None:
        """Return never; raise what ended the watch."""
        await self._records.wait_failed()

    def assignment(self, job: str, shard_id: int) -> ShardAssignment | None:
        """Who holds a shard."""
        return self._assignments.get(job, {}).get(shard_id)

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        """By shard."""
        return self._assignments.get(job, {})

    @property
    def jobs(self) -> Iterator[str]:
        """Jobs that have a record."""
        return iter(tuple(self._assignments))

    async def refresh(self, job: str) -> None:
        """Read the job's record anew. Raises what the store raises."""
        found = await self._store.get(keys.assignments(job))
        # That it is gone, the watch tells: until then what it told before must not come back.
        if found is not None:
            self._records.note(found)

    async def change(self, job: str, change: Callable[[JobAssignments], JobAssignments]) -> bool:
        """Make a change, however often etcd has to be asked; whether there still is a record."""
        while True:
            entry = self._records.get(job)
            if entry is None:
                return False
            try:
                changed = await records.change(self._store, entry, change)
            except RetryError as error:
                log.warning("assignments_not_changed", job=job, reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if changed is None:
                self._records.forget(job)
                return False
            key, value = keys.assignments(job), records.encode(changed.assignments)
            self._records.note(Item(key, value, changed.revision))
            return True

    def _put(
        self, job: str, new: records.StoredAssignments, old: records.StoredAssignments | None
    ) -> None:
        if old is not None and old.assignments.run != new.assignments.run:
            # The job was begun anew, and word of the end of its last run may still be on its way.
            self._forget(job)
        self._assignments[job] = {h.shard_id: h for h in new.assignments.shards}
        self._on_change(job)

    def _forget(self, job: str) -> None:
        self._assignments.pop(job, None)
        self._on_gone(job)
