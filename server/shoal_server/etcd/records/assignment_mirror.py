"""Mirror of the shard assignments of all jobs."""

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


class AssignmentMirror:
    """Mirror of all shard assignments. It follows etcd during its `async with` block, on one event
    loop.

    `on_change` is called with a job and its changed shards (all, if the head changed), once for
    each batch, write or reading. `on_gone` is called with a job whose head is gone, or replaced by
    another placement's. An unreadable record is logged, and the known assignment kept.
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
        """Records with a write of unknown outcome, by key."""

    async def __aenter__(self) -> "AssignmentMirror":
        await self._records.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._records.__aexit__(*exc)

    @property
    def is_in_sync(self) -> bool:
        return self._records.is_in_sync

    async def wait_failed(self) -> None:
        await self._records.wait_failed()

    @property
    def jobs(self) -> Iterator[str]:
        """Jobs with placed shards."""
        return iter(tuple(self._heads))

    def of_job(self, job: str) -> Mapping[int, ShardAssignment]:
        """A job's assignments by shard; empty if the shards are not placed."""
        head = self._heads.get(job)
        return (
            NO_SHARDS
            if head is None
            else self._assignments.get((job, head.placement_id), NO_SHARDS)
        )

    def placement_id(self, job: str) -> str:
        """The placement's id; empty if the shards are not placed."""
        head = self._heads.get(job)
        return "" if head is None else head.placement_id

    def members_placement_id(self, job: str) -> str:
        """Id that the job's members state; empty if the shards are not placed."""
        head = self._heads.get(job)
        return "" if head is None else head.kept_placement_id or head.placement_id

    def assembled(self, job: str) -> JobAssignments | None:
        """All assignments of a job; None if its shards are not placed. Raises InternalError if a
        shard has no readable record."""
        head = self._heads.get(job)
        return None if head is None else records.assembled(head, self.of_job(job))

    async def refresh(self, job: str, shard_ids: Collection[int] | None = None) -> None:
        """Read the records of these shards again; by default, of all."""
        # Only the watch deletes records: otherwise an older put, still to be delivered, would bring
        # a record back.
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
        """Replace these shards' assignments by what `wanted` returns; False if the job's records
        are gone or replaced. Shards without a readable record are left out.

        `wanted` returns its argument to change nothing, and is called again for a record that
        another process has written. Records share transactions, and those in conflict are retried
        in ever smaller ones, so that a busy record holds up no others. Raises what the store
        raises; some records may then be changed. After an unknown outcome, the next call reads the
        records first.
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
        """Repeat `change` through each RetryError and unknown outcome. Raises the store's other
        errors."""
        return await until_answered(
            lambda: self.change(job, shard_ids, wanted),
            lambda error: log.warning("assignments_not_changed", job=job, reason=str(error)),
            lambda error: is_transient(error) or is_outcome_unknown(error),
        )

    async def _write(
        self, changes: Sequence[tuple[StoredShard, ShardAssignment]]
    ) -> list[int] | None:
        """Write records in one transaction. Return the shards that another process has written
        meanwhile, or None if records are gone."""
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
        # Unreadable records are left out: they never become known, so retries would never end.
        return [
            s.assignment.shard_id
            for s, item in zip(shards, found, strict=True)
            if self._is_known(s, item)
        ]

    async def _settle(self, job: str, placement_id: str, shard_ids: Collection[int]) -> None:
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

    # Callbacks of the mirror, each about one record.

    def _put(
        self, name: str, new: JobHead | StoredShard, old: JobHead | StoredShard | None
    ) -> None:
        if isinstance(new, JobHead):
            if isinstance(old, JobHead) and old.placement_id != new.placement_id:
                # The job was started over or restored. Records of the former placement may be
                # deleted later.
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
