"""The Snapshots service, and the policy's automatic snapshots."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import structlog

from shoal_proto.errors import InvalidSpec, ShoalError, UnknownSnapshot
from shoal_proto.v1 import snapshots_pb2 as pb
from shoal_proto.v1.snapshots_pb2_grpc import SnapshotsServicer
from shoal_server.coordinator.plug_in.options import SnapshotPolicy
from shoal_server.coordinator.snapshots.restoring import SnapshotRestorer
from shoal_server.coordinator.snapshots.taking import SnapshotTaker
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.losses import RestoreAttempt
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.records import assignments, snapshot_roots
from shoal_server.serving.locations import AllowedRoots, Location
from shoal_server.serving.rpc import Context
from shoal_server.serving.tasks import SupervisedTasks, run_restarting, running
from shoal_server.serving.threads import to_thread_uncancelled
from shoal_server.snapshots.library import SnapshotLibrary
from shoal_server.snapshots.manifest import Manifest
from shoal_server.snapshots.storage import open_below

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0
JOBS_AT_ONCE = 4

OnRestored = Callable[[str, Sequence[ShardAssignment], str], object]
"""Called with (job, lost shards, description of the snapshot)."""


class SnapshotService(SnapshotsServicer):
    """Takes, lists and restores snapshots. `require_leading` raises NotLeader."""

    def __init__(
        self,
        policy: SnapshotPolicy,
        taker: SnapshotTaker,
        restorer: SnapshotRestorer,
        require_leading: Callable[[], None],
        *,
        on_restored: OnRestored = lambda job, lost, snapshot: None,
    ) -> None:
        self._policy = policy
        self._taker = taker
        self._restorer = restorer
        self._require_leading = require_leading
        self._on_restored = on_restored

    async def Take(self, request: pb.TakeSnapshotRequest, context: Context) -> pb.SnapshotSummary:
        return await self.take(request.job, request.url)

    async def take(self, job: str, url: str = "") -> pb.SnapshotSummary:
        """Take a snapshot of a job, at the URL or else at the policy's; remove leftovers there, and
        old snapshots at the policy's URL.

        Raises NotLeader, InvalidSpec without a URL, and the error that prevented the snapshot.
        """
        self._require_leading()
        library = await self._library(url, job)
        taken = await self._taker.take(library)
        default = self._policy.url
        is_default = bool(default) and library.storage.location == Location.parse(default)
        await self._clean_up(library, self._policy.num_kept if is_default else None)
        return _summary(taken.manifest, library, taken.pause_s)

    async def List(
        self, request: pb.ListSnapshotsRequest, context: Context
    ) -> pb.ListSnapshotsReply:
        self._require_leading()
        library = await self._library(request.url, request.job)
        manifests, damaged = await asyncio.to_thread(library.read_all)
        return pb.ListSnapshotsReply(
            url=library.storage.url,
            snapshots=[_summary(each, library) for each in manifests],
            every_s=self._policy.every_s,
            num_kept=self._policy.num_kept,
            damaged=[str(error) for _, error in sorted(damaged.items())],
        )

    async def Restore(
        self, request: pb.RestoreSnapshotRequest, context: Context
    ) -> pb.RestoreSnapshotReply:
        self._require_leading()
        library = await self._library(request.url, request.job)
        restored = await self._restorer.restore(library, request.number)
        self._on_restored(request.job, restored.lost, describe_snapshot(restored.manifest, library))
        summary = _summary(restored.manifest, library)
        return pb.RestoreSnapshotReply(snapshot=summary, servers=restored.servers)

    def is_restoring(self, job: str) -> bool:
        """True while this coordinator restores the job."""
        return job in self._restorer.under_way

    async def restore_lost(self, job: str, lost: Sequence[ShardAssignment]) -> RestoreAttempt:
        """Restore a job that has `lost` shards, even if it has members.

        Uses the newest snapshot of the current shards, else the one from which these were restored.
        Without such a snapshot or --snapshot-url, returns the reason. Raises what
        `SnapshotRestorer.restore` raises, except for a missing snapshot.
        """
        if not self._policy.url:
            return _not_restored("The coordinator was started without --snapshot-url")
        library = await self._library("", job)
        manifests, damaged = await asyncio.to_thread(library.read_all)
        lineage = await self._taker.current_lineage(job)
        own = [manifest for manifest in manifests if manifest.lineage == lineage]
        if own:
            number, cut_id = own[-1].number, own[-1].cut_id
        elif (source := await self._restorer.restored_from(job)) is not None:
            # The present shards began with this snapshot, not with newer ones.
            library = await self._library(source.url, job)
            number, cut_id = source.number, source.cut_id
        elif damaged:
            raise damaged[max(damaged)]
        else:
            # Those of other lineages are of an earlier run, or of another cluster.
            return _not_restored(f"No snapshot of its present shards is at {library.storage.url}")
        try:
            restored = await self._restorer.restore(library, number, cut_id=cut_id, lost=lost)
        except UnknownSnapshot:
            return _not_restored(f"Its snapshot {number} is not at {library.storage.url} any more")
        age_s = time.time() - restored.manifest.taken_unix_s
        message = f"{describe_snapshot(restored.manifest, library)}, {age_s:.0f} s old"
        self._on_restored(job, restored.lost, message)
        return RestoreAttempt(is_restored=True)

    async def announce_roots(self, store: LeaderStore) -> None:
        """Write the allowed locations of snapshots to etcd. Raises NotLeader, and what the store
        raises."""
        await snapshot_roots.write(store, self._policy.allowed)

    @asynccontextmanager
    async def working(self, store: LeaderStore) -> AsyncIterator[None]:
        """Take the automatic snapshots of all jobs with shards during the block."""
        if not self._policy.every_s:
            yield
            return
        async with running(run_restarting(partial(self._take_for_ever, store), "snapshots")):
            yield

    async def _take_for_ever(self, store: LeaderStore) -> None:
        """Take automatic snapshots, one at a time for each job."""
        due_s: dict[str, float] = {}
        slots = asyncio.Semaphore(JOBS_AT_ONCE)

        async def take(job: str) -> None:
            try:
                async with slots:
                    await self._take_by_policy(job)
            finally:
                due_s[job] = time.monotonic() + self._policy.every_s

        async with SupervisedTasks() as tasks:
            while True:
                now_s = time.monotonic()
                try:
                    jobs = await assignments.jobs(store)
                except ShoalError as error:
                    log.warning("jobs_not_listed", reason=str(error))
                    jobs = list(due_s)
                for job in due_s.keys() - set(jobs):
                    del due_s[job]
                for job in jobs:
                    if due_s.setdefault(job, now_s + self._policy.every_s) <= now_s:
                        tasks.start(take(job), key=job)
                await asyncio.sleep(min(LOOK_EVERY_S, self._policy.every_s / 4))

    async def _take_by_policy(self, job: str) -> None:
        try:
            library = await self._library("", job)
            await self._taker.take(library, only_if_changed=True)
        except ShoalError as error:
            log.warning("snapshot_failed", job=job, reason=str(error))
            return
        await self._clean_up(library, self._policy.num_kept)

    async def _clean_up(self, library: SnapshotLibrary, num_kept: int | None) -> None:
        try:
            removed = await to_thread_uncancelled(partial(library.keep_newest, num_kept))
        except ShoalError as error:
            log.warning("old_snapshots_not_removed", job=library.job, reason=str(error))
            return
        if removed:
            numbers = [each.number for each in removed]
            log.info("old_snapshots_removed", job=library.job, numbers=numbers)

    async def _library(self, url: str, job: str) -> SnapshotLibrary:
        where = url or self._policy.url
        if not where:
            raise InvalidSpec(
                "no location for snapshots was given, and the coordinator has no default",
                expected="a directory or URL",
                fix="Name one, or start the coordinator with --snapshot-url.",
            )
        roots = AllowedRoots(self._policy.allowed)
        return await asyncio.to_thread(lambda: SnapshotLibrary(open_below(roots, where), job))


def describe_snapshot(manifest: Manifest, library: SnapshotLibrary) -> str:
    step = manifest.training.get("step")
    of_step = f" of step {step}" if step else ""
    return f"snapshot {manifest.number}{of_step} at {library.storage.url}"


def _not_restored(why: str) -> RestoreAttempt:
    return RestoreAttempt(is_restored=False, reason=f"{why}.")


def _summary(
    manifest: Manifest, library: SnapshotLibrary, pause_s: float = 0.0
) -> pb.SnapshotSummary:
    return pb.SnapshotSummary(
        job=manifest.job,
        url=library.storage.url,
        number=manifest.number,
        taken_unix_s=manifest.taken_unix_s,
        num_shards=len(manifest.parts),
        num_bytes=manifest.num_bytes,
        num_new_bytes=manifest.num_new_bytes,
        partial_steps=manifest.partial_steps,
        pause_s=pause_s,
    )
