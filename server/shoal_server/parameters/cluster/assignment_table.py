"""Which server has which shard of each job, as this server last saw it in etcd, and changing it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing

import structlog

from shoal_proto.errors import RetryError, ShoalError
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import EventKind, KeyValue, KeyValueStore, Revision
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
        self._entries: dict[str, records.StoredAssignments] = {}
        self._assignments: dict[str, dict[int, ShardAssignment]] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "AssignmentTable":
        snapshot = await self._store.range(keys.ASSIGNMENTS)
        for item in snapshot.items:
            self._note_item(item)
        self._task = asyncio.create_task(self._follow(snapshot.revision), name="assignments")
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_failed(self) -> None:
        """Return never; raise what ended the watch."""
        assert self._task is not None
        await asyncio.shield(self._task)

    def assignment(self, job: str, shard_id: int) -> ShardAssignment | None:
        """Who holds a shard."""
        return self._assignments.get(job, {}).get(shard_id)

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        """By shard."""
        return self._assignments.get(job, {})

    @property
    def jobs(self) -> Iterator[str]:
        return iter(tuple(self._entries))

    async def refresh(self, job: str) -> None:
        """Read the job's record anew. Raises what the store raises."""
        entry = await records.read(self._store, job)
        if entry is not None:
            self._note(entry)

    async def change(self, job: str, change: Callable[[JobAssignments], JobAssignments]) -> bool:
        """Make a change, however often etcd has to be asked; whether there still is a record."""
        while True:
            entry = self._entries.get(job)
            if entry is None:
                return False
            try:
                changed = await records.change(self._store, entry, change)
            except RetryError as error:
                log.warning("assignments_not_changed", job=job, reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            if changed is None:
                self._forget(job)
                return False
            self._note(changed)
            return True

    async def _follow(self, revision: int) -> None:
        watch = self._store.watch(keys.ASSIGNMENTS, Revision(revision + 1))
        async with aclosing(watch) as batches:
            async for batch in batches:
                for event in batch.events:
                    if event.kind is EventKind.PUT:
                        at = Revision(event.mod_revision)
                        self._note_item(KeyValue(event.key, event.value, at, at, 1))
                        continue
                    job = event.key.removeprefix(keys.ASSIGNMENTS)
                    known = self._entries.get(job)
                    # One that was written anew since may have been read already.
                    if known is None or known.revision < event.mod_revision:
                        self._forget(job)

    def _note_item(self, item: KeyValue) -> None:
        try:
            entry = records.parse(item)
        except ShoalError:
            log.exception("assignments_unreadable", key=item.key)
            return
        self._note(entry)

    def _note(self, entry: records.StoredAssignments) -> None:
        job = entry.assignments.job
        known = self._entries.get(job)
        if known is not None and known.revision >= entry.revision:
            return
        if known is not None and known.assignments.run != entry.assignments.run:
            # The job was begun anew, and word of the end of its last run may still be on its way.
            self._forget(job)
        self._entries[job] = entry
        self._assignments[job] = {h.shard_id: h for h in entry.assignments.shards}
        self._on_change(job)

    def _forget(self, job: str) -> None:
        self._entries.pop(job, None)
        self._assignments.pop(job, None)
        self._on_gone(job)
