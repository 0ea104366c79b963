"""Shard controller: keeps enough copies of each shard, balances loads, empties leaving servers.

It only writes shard assignments to etcd. Servers carry them out, and fail over without the
controller.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from shoal_proto.dtypes import DTYPE_BYTES
from shoal_proto.errors import NotLeader, RetryError
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_server.coordinator.persistence.stored_json import state_from_json
from shoal_server.coordinator.shards.automatic_restores import AutomaticRestores, Restore
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.limits import DEAD_AFTER_S, LONGEST_GAP_S
from shoal_server.core.shards import loads, losses
from shoal_server.core.shards.abandoned_loads import AbandonedLoads
from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent
from shoal_server.core.shards.observed_servers import ObservedServers
from shoal_server.core.shards.placement import TARGET_SHARD_BYTES
from shoal_server.core.shards.rebalance import Servers, newly_lost, rebalance
from shoal_server.etcd import keys
from shoal_server.etcd.api import Compare, unchanged_since
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.mirror import MirroredKey, PrefixMirror
from shoal_server.etcd.records import assignments as records
from shoal_server.etcd.records import ended_servers, shard_map
from shoal_server.etcd.records import servers as registered
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror
from shoal_server.serving.tasks import SupervisedTasks, gather_bounded, run_restarting, running

log = structlog.get_logger(__name__)

Measure = Callable[[str], Awaitable[Mapping[int, loads.ShardMeasure]]]

JOBS_AT_ONCE = 16
RECONCILE_WITHIN_S = 120.0
LOOK_AGAIN_S = 1.0
"""Below LONGEST_GAP_S: after a longer gap, an absence counts from zero."""
MEASURE_EACH_S = 10.0
MEASURES_AT_ONCE = 16


class ShardController:
    """Controller of the shards of all jobs, on the event loop, within `working`."""

    def __init__(
        self,
        store: LeaderStore,
        restore: Restore | None = None,
        measure: Measure | None = None,
        loss_log: LossLog | None = None,
        is_restoring: Callable[[str], bool] = lambda job: False,
    ) -> None:
        """`restore`: restores a job before its shards are declared lost. `measure`: returns the
        load of a job's shards; without it, size alone weighs. `is_restoring`: True while this
        coordinator restores the job."""
        self._store = store
        self._assignments = AssignmentMirror(
            store, lambda job, shard_ids: self._look_at([job]), self._forget, resync=True
        )
        self._restores = AutomaticRestores(restore, lambda job: self._look_at([job]), is_restoring)
        self._losses = loss_log or LossLog()
        self._ask = measure
        self._num_bytes: dict[str, dict[int, int]] = {}
        self._pushed: dict[str, Mapping[int, int]] = {}
        self._weights: dict[str, dict[int, int]] = {}
        self._observed: defaultdict[str, ObservedServers] = defaultdict(
            lambda: ObservedServers(DEAD_AFTER_S, LONGEST_GAP_S)
        )
        self._loads: defaultdict[str, AbandonedLoads] = defaultdict(AbandonedLoads)
        self._last: dict[str, JobAssignments] = {}
        self._troubles: dict[str, str] = {}
        """Reason why each job's shards are left unchanged."""
        self._due: set[str] = set()
        self._again: set[str] = set()
        self._wake = asyncio.Event()

    @asynccontextmanager
    async def working(self) -> AsyncIterator["ShardController"]:
        """Run the controller during the block."""
        versions = TorchVersions()

        def changed() -> None:
            versions.note(servers.records.values())
            self._look_at_all()

        # The mirror is not used to place shards: each reconciliation reads the servers.
        servers = PrefixMirror[registered.Server](
            self._store, keys.SERVERS, _server, on_change=changed, resync=True
        )
        work = (
            run_restarting(self._work, "shards"),
            run_restarting(self._look_for_ever, "measuring-shards"),
        )
        async with servers, self._assignments, running(*work):
            try:
                yield self
            finally:
                await self._restores.close()

    def _look_at(self, jobs: Iterable[str]) -> None:
        self._due.update(jobs)
        self._wake.set()

    def _look_again(self, job: str) -> None:
        if job not in self._again:
            self._again.add(job)
            asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_now, job)

    def _look_now(self, job: str) -> None:
        self._again.discard(job)
        self._look_at([job])

    def _look_at_all(self) -> None:
        self._look_at(self._assignments.jobs)

    async def _work(self) -> None:
        slots = asyncio.Semaphore(JOBS_AT_ONCE)
        async with SupervisedTasks() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for job in list(self._due):
                    # A task wakes this loop at its end.
                    if tasks.start(self._try_reconcile(job, slots), key=job) is not None:
                        self._due.discard(job)

    async def _try_reconcile(self, job: str, slots: asyncio.Semaphore) -> None:
        try:
            async with slots, asyncio.timeout(RECONCILE_WITHIN_S):
                await self._reconcile(job)
            self._troubles.pop(job, None)
        except NotLeader as error:
            log.info("shards_not_rebalanced", job=job, reason=str(error))
        except (RetryError, TimeoutError) as error:
            if job not in self._troubles:
                log.warning("shards_not_rebalanced", job=job, reason=str(error) or "time limit")
            self._troubles[job] = repr(error)
            self._look_again(job)
        except Exception as error:  # noqa: BLE001 - an error of one job affects no other
            self._note_trouble(job, error)
        finally:
            if job in self._due:
                self._wake.set()

    async def _look_for_ever(self) -> None:
        """Look at all jobs every MEASURE_EACH_S: absent servers come to count as dead, and loads
        change."""
        while True:
            await asyncio.sleep(MEASURE_EACH_S)
            await self._measure()
            self._look_at_all()

    def _note_trouble(self, job: str, error: Exception) -> None:
        if self._troubles.get(job) == repr(error):
            return
        self._troubles[job] = repr(error)
        log.error("shards_of_job_not_rebalanced", job=job, reason=str(error), error=repr(error))

    def _forget(self, job: str) -> None:
        for by_job in (
            self._last,
            self._troubles,
            self._num_bytes,
            self._pushed,
            self._weights,
            self._observed,
            self._loads,
        ):
            by_job.pop(job, None)
        self._losses.forget(job)

    async def _servers(self) -> Servers:
        listed = await registered.read(self._store)
        return Servers(
            present=frozenset(server.holder for server in listed),
            leaving=frozenset(server.holder for server in listed if server.is_leaving),
            dead=await ended_servers.read(self._store),
        )

    async def _reconcile(self, job: str) -> None:
        if (finished := await self._finished(job)) is not None:
            # The condition fails if the job was started over.
            await self._store.transact([finished], [records.delete_assignments(job)])
            return
        weights = await self._weights_of(job)
        before = self._assignments.assembled(job)
        if before is None:
            return
        # Read after the assignments, so that their servers are in the list.
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        seen = await self._servers()
        observed = self._observed[job]
        servers = observed.judged(before, seen, asked_s=asked_s, now_s=loop.time())
        if observed.is_due_soon:
            self._look_again(job)
        is_restoring = self._restores.is_restoring(job)
        servers = replace(servers, are_loading=is_restoring)
        known = self._loads[job].mark_lost(before, is_restoring=is_restoring, now_s=loop.time())
        if self._loads[job].is_due_soon:
            self._look_again(job)
        lost_ids = newly_lost(known, servers)
        attempt = losses.RestoreAttempt(is_restored=False)
        if lost_ids:
            lost = [shard for shard in before.shards if shard.shard_id in lost_ids]
            outcome = self._restores.outcome(job, lost)
            if outcome is None:
                return
            attempt = outcome
        elif not losses.lost(known):
            self._restores.forget(job)
        target = known
        if known == before:
            # Compute in a thread, so that heartbeats do not wait for thousands of shards.
            target = await asyncio.to_thread(rebalance, before, servers, weights)
        after = self._losses.with_loss_details(known, target, attempt.reason)
        changes = {
            b.shard_id: (b, a) for b, a in zip(before.shards, after.shards, strict=True) if a != b
        }
        self._seen(before, seen.present)
        if not changes:
            return

        def rebalanced(assignment: ShardAssignment) -> ShardAssignment:
            # A record changed meanwhile stays, and makes the job due again.
            expected, wanted = changes[assignment.shard_id]
            return wanted if assignment == expected else assignment

        if await self._assignments.change(job, changes, rebalanced):
            current = self._assignments.assembled(job) or before
            observed.note_written(after, current)
            self._seen(current, seen.present)
            log.debug("shards_rebalanced", job=job, **_summary(before, after))

    def _seen(self, assignments: JobAssignments, present: Collection[Holder]) -> None:
        last = self._last.get(assignments.job)
        self._losses.log_changes(last, assignments, present)
        self._last[assignments.job] = assignments

    async def _finished(self, job: str) -> Compare | None:
        state = await self._store.get(keys.job_state(job))
        if state is None or state_from_json(job, state.value).may_go_on:
            return None
        return unchanged_since(state.key, state.mod_revision)

    async def _weights_of(self, job: str) -> Mapping[int, int]:
        if job not in self._weights:
            layout = await shard_map.read(self._store, job)
            if layout is None:
                return {}
            self._num_bytes[job] = num_bytes_of(layout)
            self._weights[job] = loads.weights(self._num_bytes[job], {}, {})
        return self._weights[job]

    async def _measure(self) -> None:
        if self._ask is not None:
            # Concurrently, since a server may hang.
            await gather_bounded(self._measure_one, list(self._num_bytes), MEASURES_AT_ONCE)

    async def _measure_one(self, job: str) -> None:
        assert self._ask is not None
        try:
            measures = await self._ask(job)
        except Exception as error:  # noqa: BLE001 - the others are measured all the same
            log.warning("shards_not_measured", job=job, reason=repr(error))
            return
        self._losses.measured(job, {shard_id: each.version for shard_id, each in measures.items()})
        pushed = {shard_id: each.pushed_bytes for shard_id, each in measures.items()}
        before, num_bytes = self._pushed.get(job, {}), self._num_bytes.get(job, {})
        self._pushed[job] = pushed
        # A shard without a measure would seem idle.
        if before.keys() == pushed.keys() == num_bytes.keys():
            self._weights[job] = loads.weights(num_bytes, before, pushed)


class TorchVersions:
    """Logs a warning if servers run different versions of torch: copies may then differ from their
    primary in the last bits."""

    def __init__(self) -> None:
        self._logged: dict[str, list[str]] = {}

    def note(self, servers: Iterable[registered.Server]) -> None:
        """Warn once for each mixture."""
        by_version: dict[str, list[str]] = defaultdict(list)
        for server in servers:
            if server.torch_version:
                by_version[server.torch_version].append(server.holder.server_id)
        versions = {version: sorted(by_version[version]) for version in sorted(by_version)}
        if len(versions) > 1 and versions != self._logged:
            log.warning(
                "torch_versions_differ",
                servers=versions,
                reason="copies of a shard may differ in the last bits from its primary",
                fix="Run the same version of torch on every parameter server.",
            )
        self._logged = versions


def _server(item: MirroredKey) -> registered.Server | None:
    return next(iter(registered.parse_all({item.key: item.value})), None)


def num_bytes_of(layout: ShardMap) -> dict[int, int]:
    """Size in bytes of each shard's values; the target size for shards of tables."""
    return {
        shard.shard_id: TARGET_SHARD_BYTES
        if shard.table
        else max(1, sum(b.num_elements for b in shard.blocks) * DTYPE_BYTES.get(shard.dtype, 4))
        for shard in layout.shards
    }


def _summary(before: JobAssignments, after: JobAssignments) -> dict[str, int]:
    """Count the changed shards by kind. `rescued`: another server became primary; `lost`: a new
    epoch without values; `recruiting`: a server joins; `handing_over`: a backup is to become
    primary; `relieved`: fewer backups."""
    pairs = list(zip(before.shards, after.shards, strict=True))
    in_new_epoch = [a for b, a in pairs if a.epoch != b.epoch]
    lost = sum(a.content is ShardContent.LOST for a in in_new_epoch)
    return {
        "rescued": len(in_new_epoch) - lost,
        "lost": lost,
        "recruiting": sum(a.joining != b.joining and a.joining is not None for b, a in pairs),
        "handing_over": sum(
            a.successor != b.successor and a.successor is not None for b, a in pairs
        ),
        "relieved": sum(len(a.backups) < len(b.backups) for b, a in pairs),
    }
