"""Restoring a snapshot: its shards are assigned to the servers that are present now.

One transaction replaces the job's assignment records, with higher epochs, and its sample ledger, so
that each shard is held by a server or known to be lost even if this coordinator dies. Each server
then drops its shards of the job, and loads those whose primary it is (`loading`). If a server that
stays cannot load, all shards that had values are recorded as lost. The records of a job that had no
shards are deleted.
"""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog

from shoal_proto.errors import (
    DeadlineExceeded,
    InternalError,
    JobFinished,
    JobInUse,
    NothingLost,
    ProposalConflict,
    ShoalError,
    SnapshotDamaged,
)
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_server.coordinator.persistence.quarantine import unreadable
from shoal_server.coordinator.persistence.stored_json import state_from_json
from shoal_server.coordinator.servers.answering import Choose
from shoal_server.coordinator.servers.server_calls import ServerCalls
from shoal_server.coordinator.snapshots.loading import SnapshotLoader
from shoal_server.core.processes import Holder
from shoal_server.core.samples.ledger import SampleLedger
from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.placement import least_loaded
from shoal_server.etcd import keys
from shoal_server.etcd.api import (
    Compare,
    Delete,
    Operation,
    Put,
    Revision,
    TransactionResult,
    none_written_after,
    unchanged_since,
    value_is,
)
from shoal_server.etcd.json_fields import UnreadableRecord
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments, restored_from, shard_map
from shoal_server.etcd.records.restored_from import RestoredFrom
from shoal_server.serving.unix_clock import unix_s
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest

log = structlog.get_logger(__name__)

DEFAULT_COPIES = 2
MAX_TRIES = 3
"""Attempts while the job's records change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    manifest: Manifest
    servers: Sequence[str]
    """Servers that are primaries now."""
    lost: Sequence[ShardAssignment]
    """Shards lost before the restore."""


class SnapshotRestorer:
    """Restores jobs, on one event loop."""

    def __init__(
        self,
        store: LeaderStore,
        calls: ServerCalls,
        on_cursor: Callable[[str], None],
        choose: Choose,
    ) -> None:
        """`on_cursor` is called with a job after its sample ledger was replaced. `choose` selects
        the live servers."""
        self._store = store
        self._on_cursor = on_cursor
        self._loader = SnapshotLoader(store, calls, choose)
        self.under_way: Counter[str] = Counter()
        """Number of restores in progress, by job."""

    async def restore(
        self,
        library: SnapshotLibrary,
        number: int = 0,
        *,
        cut_id: str = "",
        lost: Collection[ShardAssignment] | None = None,
    ) -> RestoreResult:
        """Replace the job's shards by those of a snapshot (`number` and `cut_id`: see
        `SnapshotLibrary.find`).

        `lost`: the lost shards for which the coordinator restores the job; None if an operator
        requested the restore.

        Raises JobFinished; JobInUse if the job has members, or, with `lost`, NothingLost if no
        shard of the job is lost any more; ProposalConflict if its shards are cut differently now;
        UnknownSnapshot, SnapshotDamaged, NoServers, DeadlineExceeded if its records change
        meanwhile, JobQuarantined if its own record cannot be read, what the store raises, and the
        error of a server that cannot load.
        """
        job = library.job
        self.under_way[job] += 1
        try:
            find = partial(library.find, number, cut_id)
            return await self._restore(library, find, lost)
        finally:
            self.under_way -= Counter([job])

    async def restored_from(self, job: str) -> RestoredFrom | None:
        """Return the job's last restored snapshot, if any. Raises InternalError, and what the store
        raises."""
        return await restored_from.read(self._store, job)

    async def _restore(
        self,
        library: SnapshotLibrary,
        find: Callable[[], Manifest],
        lost: Collection[ShardAssignment] | None,
    ) -> RestoreResult:
        job = library.job
        await self._check_not_finished(job)
        manifest = await asyncio.to_thread(find)
        layout = _checked(manifest)
        if lost is None:
            await self._check_unused(job)
        present = await self._loader.present(job)
        source = RestoredFrom(
            url=library.storage.url, number=manifest.number, cut_id=manifest.cut_id
        )
        before, wanted = await self._replaced(manifest, layout, sorted(present), source, lost)
        try:
            wanted = await self._loader.load_all(library, manifest, wanted, present)
        except ShoalError as error:
            if before is None:
                await self._take_away(wanted)
            else:
                why = f"Restoring snapshot {manifest.number} failed: {error}"
                await self._record_loss(before, wanted, why)
            raise
        except BaseException:
            # Without records, a member could create the shards of a trained job with initial
            # values. The next leader finds shards that no server loads (`AbandonedLoads`).
            if before is None:
                await self._take_away(wanted)
            raise
        lost_before = losses.lost(before) if before is not None else ()
        servers = sorted({assignment.primary.server_id for assignment in wanted.shards})
        log.info("snapshot_restored", job=job, number=manifest.number, servers=servers)
        return RestoreResult(manifest=manifest, servers=servers, lost=lost_before)

    async def _check_not_finished(self, job: str) -> None:
        state = await self._store.get(keys.job_state(job))
        if state is None:
            return
        try:
            finished = state_from_json(job, state.value).finished
        except UnreadableRecord as error:
            raise unreadable(job, state.key, error) from error
        if finished:
            raise JobFinished(
                f"job {job} is finished: its restored shards would be dropped at once",
                seen="a finished job",
                expected="a job that can train on",
                fix=f"`shoal rm {job}` removes the job and keeps its snapshots; then restore.",
            )

    async def _check_unused(self, job: str) -> None:
        members = [
            item.key.removeprefix(keys.members(job))
            for item in (await self._store.range(keys.members(job))).items
        ]
        if members:
            raise JobInUse(
                f"job {job} has members that train on the shards that would be replaced",
                seen=", ".join(members[:8]),
                expected="none",
                fix="Stop them, restore, and start them again.",
            )

    async def _replaced(
        self,
        manifest: Manifest,
        layout: ShardMap,
        present: Sequence[Holder],
        source: RestoredFrom,
        lost: Collection[ShardAssignment] | None,
    ) -> tuple[JobAssignments | None, JobAssignments]:
        """Write the new assignments, ledger and lineage. Returns the earlier assignments, if any,
        and the new ones. With `lost`, the job's members continue with the restored shards."""
        job = manifest.job
        await self._check_layout(job, layout)
        stored = shard_map.stored(layout)
        head = keys.assignments_head(job)
        for _ in range(MAX_TRIES):
            held = await self._store.get(head)
            before = await assignments.read(self._store, job)
            if lost is not None:
                _check_lost(job, before, lost)
            wanted = _wanted(manifest, before, present, keeps_placement_id=lost is not None)
            chunks_exist = await shard_map.write_chunks(self._store, stored)
            result = await assignments.place(
                self._store,
                wanted,
                compares=[
                    chunks_exist,
                    unchanged_since(head, held.mod_revision if held is not None else Revision(0)),
                    *_none_changed(before),
                ],
                operations=[
                    stored.head,
                    Put(keys.lineage(job), secrets.token_hex(8).encode()),
                    restored_from.written(job, source),
                    _ledger(manifest),
                ],
            )
            if result.succeeded:
                break
        _require(result, job)
        await shard_map.delete_other_layouts(self._store, stored, result.revision)
        self._on_cursor(job)
        return None if before is None else before.assignments, wanted

    async def _check_layout(self, job: str, layout: ShardMap) -> None:
        held = await shard_map.read(self._store, job)
        if held is not None and _cut_of(held) != _cut_of(layout):
            raise ProposalConflict(
                f"the shards of job {job} differ from those of the snapshot",
                seen=f"{len(held.shards)} shards of schema {held.schema_digest[:12]}",
                expected=f"{len(layout.shards)} of schema {layout.schema_digest[:12]}",
                fix="Restore in a new cluster, under the name of the snapshot's job.",
            )

    async def _take_away(self, wanted: JobAssignments) -> None:
        """Delete a failed restore's records, unless another restore followed."""
        job = wanted.job
        try:
            await self._store.transact([_is_placed(wanted)], [assignments.delete_assignments(job)])
        except ShoalError as error:
            log.error("restore_incomplete", job=job, reason=str(error))

    async def _record_loss(self, before: JobAssignments, wanted: JobAssignments, why: str) -> None:
        """Record that the job's shards are lost, unless another restore followed."""
        record = losses.after_failed_restore(before, wanted, why, unix_s())
        record = replace(record, placement_id=secrets.token_hex(8))
        try:
            await assignments.place(self._store, record, compares=[_is_placed(wanted)])
        except ShoalError as error:
            # Shards that no server loads are declared lost later (`AbandonedLoads`).
            log.error("restore_incomplete", job=record.job, reason=str(error))


def _wanted(
    manifest: Manifest,
    before: assignments.StoredAssignments | None,
    present: Sequence[Holder],
    *,
    keeps_placement_id: bool,
) -> JobAssignments:
    """Return assignments in which no shard is loaded."""
    epochs = {part.shard_id: part.epoch for part in manifest.parts}
    for shard in before.assignments.shards if before is not None else ():
        epochs[shard.shard_id] = max(shard.epoch, epochs.get(shard.shard_id, 0))
    sizes = {part.shard_id: part.num_bytes for part in manifest.parts}
    primaries = least_loaded(sizes, present, {})
    return JobAssignments(
        job=manifest.job,
        copies=before.assignments.copies if before is not None else DEFAULT_COPIES,
        shards=tuple(
            ShardAssignment(
                shard_id=part.shard_id,
                epoch=epochs[part.shard_id] + 1,
                primary=primaries[part.shard_id],
                content=ShardContent.LOADING,
                restored_version=part.version,
            )
            for part in sorted(manifest.parts, key=lambda part: part.shard_id)
        ),
        placement_id=secrets.token_hex(8),
        kept_placement_id=before.assignments.members_placement_id
        if before is not None and keeps_placement_id
        else "",
    )


def _check_lost(
    job: str, current: assignments.StoredAssignments | None, lost: Collection[ShardAssignment]
) -> None:
    held = current.assignments if current is not None else None
    if not losses.is_still_lost(held, lost):
        raise NothingLost(
            f"job {job} has lost no shard any more: no snapshot replaces its shards",
            seen="shards that were recovered or given up since" if held else "no shards",
            expected="a shard that is still lost",
            fix="Nothing need be done.",
        )


def _none_changed(before: assignments.StoredAssignments | None) -> Sequence[Compare]:
    if before is None:
        return []
    of_placement = keys.assignments_of_placement(
        before.assignments.job, before.assignments.placement_id
    )
    return [none_written_after(of_placement, before.revision)]


def _is_placed(placed: JobAssignments) -> Compare:
    return value_is(keys.assignments_head(placed.job), assignments.encode_head(placed))


def _require(result: TransactionResult, job: str) -> None:
    if not result.succeeded:
        raise DeadlineExceeded(
            f"the holders of job {job} changed while it was restored", fix="Restore again."
        )


def _checked(manifest: Manifest) -> ShardMap:
    """Return the snapshot's layout. Raises SnapshotDamaged if the layout does not match the parts,
    or the cursor is not a sample ledger."""
    try:
        layout = shard_map.from_bytes(manifest.job, manifest.layout)
        if manifest.cursor is not None:
            SampleLedger.from_json(manifest.cursor)
    except (InternalError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _damaged(manifest, repr(error)[:200], "a layout and a cursor that parse") from error
    expected = sorted(shard.shard_id for shard in layout.shards)
    seen = sorted(part.shard_id for part in manifest.parts)
    if layout.job != manifest.job or seen != expected:
        raise _damaged(
            manifest,
            f"parts of shards {seen[:10]}",
            f"one of each shard of job {manifest.job}: {expected[:10]}",
        )
    return layout


def _damaged(manifest: Manifest, seen: str, expected: str) -> SnapshotDamaged:
    return SnapshotDamaged(
        f"snapshot {manifest.number} of job {manifest.job} does not fit together",
        seen=seen,
        expected=expected,
        fix="Restore another snapshot.",
        details={"number": str(manifest.number)},
    )


def _ledger(manifest: Manifest) -> Operation:
    """Return the write of the snapshot's sample ledger, in which no member holds samples."""
    key = keys.sample_ledger(manifest.job)
    if manifest.cursor is None:
        return Delete(key)
    ledger = SampleLedger.from_json(manifest.cursor)
    for member_id, _ in ledger.holders:
        # What a member has trained on since the snapshot is undone: its reports must not count.
        ledger.give_back(member_id)
    return Put(key, json.dumps(ledger.to_json(), separators=(",", ":")).encode())


def _cut_of(layout: ShardMap) -> bytes:
    bare = ShardMap()
    bare.CopyFrom(layout)
    for shard in bare.shards:
        shard.server_id, shard.address, shard.epoch = "", "", 0
    return bare.SerializeToString(deterministic=True)
