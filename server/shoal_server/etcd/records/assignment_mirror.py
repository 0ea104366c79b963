"""Mirror of the shard assignments of every job, which are changed shard by shard."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import structlog

from shoal_proto.errors import ShoalError
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment
from shoal_server.etcd import keys
from shoal_server.etcd.api import Get, Keyspace, KeyValue
from shoal_server.etcd.mirror import MirroredKey, PrefixMirror
from shoal_server.etcd.records import assignments as records
from shoal_server.etcd.records.assignments import Change, JobHead, StoredShard
from shoal_server.etcd.repeat import is_outcome_unknown, is_transient, until_answered
from shoal_server.serving.tasks import gather_bounded

log = structlog.get_logger(__name__)

NO_SHARDS: Mapping[int, ShardAssignment] = MappingProxyType({})
Run = tuple[str, str]
"""A job, and the random id of one of its placements."""


class AssignmentMirror:
    """Mirror of all shard assignments. Use it on one event loop; it follows etcd during its
    `async with` block.

    `on_change` is called with a job and its shards whose records changed (all shards, if the head
    changed), once for each batch from etcd and each write or reading of this mirror. `on_gone` is
    called with a job whose head was deleted, or replaced by the head of another placement. An
    unreadable record is logged, and the known assignment of its shard is kept.
    """

    def __init__(
        self,
        store: Keyspace,
        on_change: Callable[[str, Collection[int]], object],
        on_gone: Callable[[str], object],
        *,
        resync: bool = False,
    ) -> None:
        """`resync`: see `PrefixMirror`."""
        self._store = store
        self._on_change = on_change
        self._on_gone = on_gone
        self._records: PrefixMirror[JobHead | StoredShard] = PrefixMirror(
            store,
            keys.ASSIGNMENTS,
            records.parse,
            on_put=self._put,
            on_delete=self._delete,
            on_change=self._flush,
            resync=resync,
        )
        self._heads: dict[str, JobHead] = {}
        self._shards: dict[Run, dict[int, StoredShard]] = {}
        self._assignments: dict[Run, dict[int, ShardAssignment]] = {}
        self._changed: dict[str, set[int]] = {}
        self._unsettled: dict[str, StoredShard] = {}
        """Records, by key, for which a write of unknown outcome was sent."""

    async def __aenter__(self) -> "AssignmentMirror":
        await self._records.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._records.__aexit__(*exc)

    @property
    def is_in_sync(self) -> bool:
        """True if the last listing has been applied, and the watch continues from it."""
        return self._records.is_in_sync

    async def wait_failed(self) -> None:
        """Wait until the mirror ends, and raise its error. Never returns."""
        await self._records.wait_failed()

    @property
    def jobs(self) -> Iterator[str]:
        """Jobs whose shards are placed."""
        return iter(tuple(self._heads))

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        """Assignments of the job by shard; empty if its shards are not placed."""
        head = self._heads.get(job)
        return (
            NO_SHARDS
            if head is None
            else self._assignments.get((job, head.placement_id), NO_SHARDS)
        )

    def placement_id(self, job: str) -> str:
        """Random id of the job's placement; empty if its shards are not placed."""
        head = self._heads.get(job)
        return "" if head is None else head.placement_id

    def members_placement_id(self, job: str) -> str:
        """Id that the job's members state; empty if its shards are not placed."""
        head = self._heads.get(job)
        return "" if head is None else head.kept_placement_id or head.placement_id

    def assembled(self, job: str) -> JobAssignments | None:
        """All assignments of a job; None if its shards are not placed. Raises InternalError if a
        shard has no readable record."""
        head = self._heads.get(job)
        return None if head is None else records.assembled(head, self.of_job(job))

    async def refresh(self, job: str, shard_ids: Collection[int] | None = None) -> None:
        """Read the records of these shards again; by default, of all shards. Raises what the store
        raises."""
        # Only the watch deletes records: after a deletion here, an older put that the watch still
        # has to deliver would bring the record back.
        head = self._heads.get(job)
        if head is not None and shard_ids is not None:
            wanted = [
                keys.shard_assignment(job, head.placement_id, shard_id) for shard_id in shard_ids
            ]
            gets = [Get(key) for key in (keys.assignments_head(job), *wanted)]
            if len(gets) <= records.SHARDS_A_TRANSACTION:
                read = (await self._store.transact((), gets)).reads
                self._records.note_all([item for found in read for item in found])
                if self._heads.get(job) == head:
                    return
        self._records.note_all((await self._store.range(keys.assignments(job))).items)

    async def change(self, job: str, shard_ids: Collection[int], wanted: Change) -> bool:
        """Replace the assignment of each of these shards by what `wanted` returns for it; return
        False if the job's records are gone or replaced. Shards without a known record are left out,
        and so are records that another process wrote and that cannot be read.

        `wanted` returns its argument to change nothing, and is called again for a record that
        another process wrote meanwhile. Many records share a transaction. After a conflict, its
        records are retried in smaller transactions, in the end one by one, so that a record that is
        written often does not hold up the others. Raises what the store raises. Some records may
        then have been changed; the next call finds that out before it calls `wanted`.
        """
        head = self._heads.get(job)
        remaining, size = list(shard_ids), records.SHARDS_A_TRANSACTION
        while head is not None and self._heads.get(job) == head:
            await self._settle(job, head.placement_id, remaining)
            stored = self._shards.get((job, head.placement_id), {})
            changes = [
                (shard, target)
                for shard_id in remaining
                if (shard := stored.get(shard_id)) is not None
                and (target := wanted(shard.assignment)) != shard.assignment
            ]
            if not changes:
                return True
            batches = [changes[start : start + size] for start in range(0, len(changes), size)]
            found = await gather_bounded(self._write, batches, records.TRANSACTIONS_AT_ONCE)
            if any(each is None for each in found):
                return False
            remaining, size = [i for each in found for i in each or ()], max(1, size // 10)
        return False

    async def change_until_written(
        self, job: str, shard_ids: Collection[int], wanted: Change
    ) -> bool:
        """Do as `change` does, and repeat it after each RetryError or unknown outcome, however
        often that happens. Raises any other error of the store."""
        return await until_answered(
            lambda: self.change(job, shard_ids, wanted),
            lambda error: log.warning("assignments_not_changed", job=job, reason=str(error)),
            lambda error: is_transient(error) or is_outcome_unknown(error),
        )

    async def _write(
        self, changes: Sequence[tuple[StoredShard, ShardAssignment]]
    ) -> list[int] | None:
        """Write records in one transaction. Return the ids of shards whose records another process
        has written meanwhile (empty: all were written), or None if some records are gone."""
        shards, targets = [shard for shard, _ in changes], [target for _, target in changes]
        try:
            is_done, found = await records.change(self._store, shards, targets)
        except BaseException as error:
            # A cancelled call does not know its outcome either.
            if not isinstance(error, ShoalError) or is_outcome_unknown(error):
                self._unsettled |= {shard.key: shard for shard in shards}
            raise
        self._records.note_all(found)
        if is_done:
            return []
        if len(found) < len(shards):
            return None
        # Unreadable records are left out: their new revisions never become known, so a retry would
        # never end.
        return [
            s.assignment.shard_id
            for s, item in zip(shards, found, strict=True)
            if self._is_known(s, item)
        ]

    async def _settle(self, job: str, placement_id: str, shard_ids: Collection[int]) -> None:
        """Find out unknown outcomes of earlier writes to these shards. Raises what the store
        raises."""
        if not self._unsettled:
            return
        known = self._shards.get((job, placement_id), {})
        for shard_id in shard_ids:
            shard = self._unsettled.get(keys.shard_assignment(job, placement_id, shard_id))
            if shard is None:
                continue
            if shard_id in known and known[shard_id].revision == shard.revision:
                self._records.note_all(await records.settled(self._store, [shard]))
            self._unsettled.pop(shard.key, None)

    def _is_known(self, shard: StoredShard, item: MirroredKey | KeyValue) -> bool:
        known = self._shards.get((shard.job, shard.placement_id), {}).get(shard.assignment.shard_id)
        return known is not None and known.revision >= item.mod_revision

    # Callbacks of the mirror of records: each call is about one record.

    def _put(
        self, name: str, new: JobHead | StoredShard, old: JobHead | StoredShard | None
    ) -> None:
        if isinstance(new, JobHead):
            if isinstance(old, JobHead) and old.placement_id != new.placement_id:
                # The shards were placed anew: the job was started over or restored. The records of
                # the former placement may be deleted later.
                self._forget(new.job)
            self._heads[new.job] = new
            self._changed[new.job] = set(self.of_job(new.job))
            return
        shard_id, placement = new.assignment.shard_id, (new.job, new.placement_id)
        self._shards.setdefault(placement, {})[shard_id] = new
        self._assignments.setdefault(placement, {})[shard_id] = new.assignment
        self._note_changed(new)

    def _delete(self, name: str, old: JobHead | StoredShard) -> None:
        if isinstance(old, JobHead):
            self._forget(old.job)
            return
        self._unsettled.pop(old.key, None)
        placement = old.job, old.placement_id
        for of_placement in (self._shards, self._assignments):
            of_placement[placement].pop(old.assignment.shard_id)
            if not of_placement[placement]:
                del of_placement[placement]
        self._note_changed(old)

    def _note_changed(self, shard: StoredShard) -> None:
        head = self._heads.get(shard.job)
        if head is not None and head.placement_id == shard.placement_id:
            self._changed.setdefault(shard.job, set()).add(shard.assignment.shard_id)

    def _forget(self, job: str) -> None:
        del self._heads[job]
        self._changed.pop(job, None)
        self._on_gone(job)

    def _flush(self) -> None:
        changed, self._changed = self._changed, {}
        for job, shard_ids in changed.items():
            self._on_change(job, shard_ids)
