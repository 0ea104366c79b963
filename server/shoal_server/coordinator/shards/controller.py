"""The coordinator's care for shards: enough copies, even loads, nothing on servers that leave.

It only writes wishes into the records of who holds what; servers carry them out and take over from
each other without it. So nothing is lost while no coordinator leads.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import structlog

from shoal_proto.dtypes import DTYPE_BYTES
from shoal_proto.errors import RetryError, ShoalError
from shoal_proto.v1.shards_pb2 import ShardMap
from shoal_server.coordinator.persistence.stored_json import state_from_json
from shoal_server.coordinator.shards.automatic_restores import AutomaticRestores, Restore
from shoal_server.coordinator.shards.loss_log import LossLog
from shoal_server.coordinator.shards.torch_versions import watching_torch_versions
from shoal_server.core.replication.protocol.limits import DEAD_AFTER_S
from shoal_server.core.shards import loads, losses
from shoal_server.core.shards.absences import Absences
from shoal_server.core.shards.assignments import Holder, JobAssignments, ShardAssignment
from shoal_server.core.shards.placement import TARGET_SHARD_BYTES
from shoal_server.core.shards.rebalance import Servers, gone_on_without, num_lost, rebalance
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValueStore, Revision
from shoal_server.etcd.mirror import PrefixMirror
from shoal_server.etcd.records import ended_servers, shard_map
from shoal_server.etcd.records import servers as registered
from shoal_server.etcd.records.assignment_mirror import AssignmentMirror
from shoal_server.serving.tasks import gather_bounded, running

log = structlog.get_logger(__name__)

Measure = Callable[[str], Awaitable[Mapping[int, loads.ShardMeasure]]]

RETRY_PAUSE_S = 0.5
SUSPECT_S = 3.0
MEASURE_EACH_S = 10.0
MEASURES_AT_ONCE = 16


class ShardController:
    """Lives on the event loop; works between `lead()` and `step_down()`."""

    def __init__(
        self,
        store: KeyValueStore,
        restore: Restore | None = None,
        measure: Measure | None = None,
        loss_log: LossLog | None = None,
    ) -> None:
        """`restore` is asked before shards that nobody has any more are called lost: whether it
        brought all of the job back from a snapshot. `measure` asks the servers of a job how its
        shards are; without it, or where not every shard could be asked for, sizes alone say what a
        shard weighs. `loss_log` is told of shards that are lost."""
        self._store = store
        self._assignments = AssignmentMirror(
            store, lambda job, shard_ids: self._look_at([job]), self._forget, resync=True
        )
        self._restores = AutomaticRestores(restore, lambda job: self._look_at([job]))
        self._losses = loss_log or LossLog()
        self._ask = measure
        self._num_bytes: dict[str, dict[int, int]] = {}
        self._pushed: dict[str, Mapping[int, int]] = {}
        self._weights: dict[str, dict[int, int]] = {}
        self._gone: dict[str, Absences[Holder]] = defaultdict(Absences)
        """By job: holders of its shards."""
        self._gone_disks: dict[str, Absences[str]] = defaultdict(Absences)
        """By job: ids of servers on whose disk its shards are."""
        self._suspect_until_s: dict[Holder, float] = {}
        self._last: dict[str, JobAssignments] = {}
        self._troubles: dict[str, str] = {}
        """By job: why its shards are left as they are, which is logged once."""
        self._due: set[str] = set()
        """Jobs to be looked at."""
        self._wake = asyncio.Event()

    @asynccontextmanager
    async def working(self) -> AsyncIterator["ShardController"]:
        """Works as long as the block runs."""
        # Servers are read when there is work; here it is only told that something changed.
        servers = PrefixMirror[Revision](
            self._store,
            keys.SERVERS,
            lambda item: item.mod_revision,
            on_change=self._look_at_all,
            resync=True,
        )
        versions = watching_torch_versions(self._store)
        async with servers, self._assignments, versions, running(self._work()):
            try:
                yield self
            finally:
                await self._restores.close()

    def _look_at(self, jobs: Iterable[str]) -> None:
        self._due.update(jobs)
        self._wake.set()

    def _look_at_all(self) -> None:
        self._look_at(self._assignments.jobs)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        measure_at_s = loop.time() + MEASURE_EACH_S
        while True:
            # Now and then without being woken: a server that stays away becomes a dead one, and
            # loads change.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(measure_at_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if loop.time() >= measure_at_s:
                    measure_at_s = loop.time() + MEASURE_EACH_S
                    self._look_at_all()
                    await self._measure()
                await self._reconcile_due()
            except Exception as error:
                # The outermost frame of this work: were it to end, nothing were copied again.
                if isinstance(error, ShoalError):
                    log.warning("shards_not_rebalanced", reason=str(error))
                else:
                    log.exception("shards_not_rebalanced", error=repr(error))
                await asyncio.sleep(RETRY_PAUSE_S)
                self._wake.set()

    async def _reconcile_due(self) -> None:
        due, self._due = self._due, set()
        while due:
            job = due.pop()
            try:
                await self._reconcile(job)
                self._troubles.pop(job, None)
            except RetryError:
                self._look_at([job, *due])
                raise
            except Exception as error:  # noqa: BLE001 - one job's trouble is to harm no other
                self._note_trouble(job, error)

    def _note_trouble(self, job: str, error: Exception) -> None:
        if self._troubles.get(job) == repr(error):
            return
        self._troubles[job] = repr(error)
        log.error("shards_of_job_not_rebalanced", job=job, reason=str(error), error=repr(error))

    def _forget(self, job: str) -> None:
        """The job's records are gone, or of another run."""
        for known_of_it in (
            self._last,
            self._troubles,
            self._num_bytes,
            self._pushed,
            self._weights,
        ):
            known_of_it.pop(job, None)
        for gone in (self._gone, self._gone_disks):
            gone.pop(job, None)
        self._losses.forget(job)

    async def _servers(self) -> Servers:
        found = await registered.read(self._store)
        return Servers(
            present=frozenset(server.holder for server in found),
            leaving=frozenset(server.holder for server in found if server.is_leaving),
            dead=await ended_servers.read(self._store),
        )

    async def _reconcile(self, job: str) -> None:
        if await self._is_finished(job):
            await self._store.delete(keys.assignments(job), prefix=True)
            return
        weights = await self._weights_of(job)
        before = self._assignments.assembled(job)
        if before is None:
            return
        # After the assignments, so that whoever these name is seen if it is there.
        seen = await self._servers()
        servers = replace(
            seen,
            dead=self._dead(before, seen),
            suspects=self._suspects(before, seen),
            disks=self._disks(before, seen),
        )
        lost = num_lost(before, servers)
        tried = losses.RestoreAttempt(is_restored=False)
        if lost:
            outcome = self._restores.outcome(job)
            if outcome is None:
                return
            tried = outcome
        elif not losses.lost(before):
            self._restores.forget(job)
        # Of thousands of shards it takes a while, in which heartbeats are heard.
        wished = await asyncio.to_thread(rebalance, before, servers, weights)
        after = self._losses.noted(before, wished, tried.told)
        changes = {
            b.shard_id: (b, a) for b, a in zip(before.shards, after.shards, strict=True) if a != b
        }
        self._seen(before)
        if not changes:
            return

        def rebalanced(assignment: ShardAssignment) -> ShardAssignment:
            # Whoever wrote it meanwhile has this job looked at once more.
            then, wanted = changes[assignment.shard_id]
            return wanted if assignment == then else assignment

        if await self._assignments.change(job, changes, rebalanced):
            self._seen(self._assignments.assembled(job) or before)
            log.info("shards_rebalanced", job=job, **_summary(before, after))

    def _seen(self, assignments: JobAssignments) -> None:
        last = self._last.get(assignments.job)
        self._losses.tell(last, assignments)
        self._last[assignments.job] = assignments

    def _dead(self, assignments: JobAssignments, seen: Servers) -> frozenset[Holder]:
        """Holders that will not come back with what they held: they are known to have ended, or
        were away for so long that they acknowledge nothing any more. That another process has their
        name says nothing: they may be cut off, and serve."""
        held_by = {holder for assignment in assignments.shards for holder in assignment.holders}
        away_s = self._gone[assignments.job].away_s(held_by - seen.present, time.monotonic())
        return seen.dead | frozenset(
            holder for holder, for_s in away_s.items() if for_s >= DEAD_AFTER_S
        )

    def _disks(self, assignments: JobAssignments, seen: Servers) -> frozenset[str]:
        """Servers whose journals are not given up yet. One that is back and found nothing in its
        own has said so in the record."""
        present = {holder.server_id for holder in seen.present}
        disks = {h.on_disk for h in assignments.shards if h.on_disk}
        away_s = self._gone_disks[assignments.job].away_s(disks - present, time.monotonic())
        return frozenset(disks & present) | {
            server_id for server_id, for_s in away_s.items() if for_s < DEAD_AFTER_S
        }

    def _suspects(self, assignments: JobAssignments, seen: Servers) -> frozenset[Holder]:
        """Those whose peers went on without them. If they live after all, they are given shards
        again a little later."""
        now_s = time.monotonic()
        before = self._last.get(assignments.job, assignments)
        dropped = gone_on_without(before, assignments) & seen.present
        self._suspect_until_s.update(dict.fromkeys(dropped, now_s + SUSPECT_S))
        self._suspect_until_s = {
            holder: until_s
            for holder, until_s in self._suspect_until_s.items()
            if until_s > now_s and holder in seen.present
        }
        if dropped:
            asyncio.get_running_loop().call_later(SUSPECT_S, self._look_at_all)
        return frozenset(self._suspect_until_s)

    async def _is_finished(self, job: str) -> bool:
        state = await self._store.get(keys.job_state(job))
        if state is None:
            return False
        return state_from_json(job, state.value).finished

    async def _weights_of(self, job: str) -> Mapping[int, int]:
        if job not in self._weights:
            layout = await shard_map.read(self._store, job)
            if layout is None:
                return {}
            self._num_bytes[job] = num_bytes_of(layout)
            self._weights[job] = loads.weights(self._num_bytes[job], {}, {})
        return self._weights[job]

    async def _measure(self) -> None:
        """Weigh shards by what was pushed to them since the last time, too; and remember their
        versions, for when they are lost."""
        if self._ask is not None:
            # Side by side: a server that hangs is waited for by each job that it has shards of.
            await gather_bounded(self._measure_one, list(self._num_bytes), MEASURES_AT_ONCE)

    async def _measure_one(self, job: str) -> None:
        assert self._ask is not None
        try:
            found = await self._ask(job)
        except RetryError:
            raise
        except ShoalError as error:
            self._note_trouble(job, error)
            return
        self._losses.measured(job, {shard_id: each.version for shard_id, each in found.items()})
        pushed = {shard_id: each.pushed_bytes for shard_id, each in found.items()}
        before, num_bytes = self._pushed.get(job, {}), self._num_bytes.get(job, {})
        self._pushed[job] = pushed
        # Those that could not be asked for would seem idle.
        if before.keys() == pushed.keys() == num_bytes.keys():
            self._weights[job] = loads.weights(num_bytes, before, pushed)


def num_bytes_of(layout: ShardMap) -> dict[int, int]:
    """By shard: the bytes of its values; for one of a table, which has no fixed size, those of a
    usual shard."""
    return {
        shard.shard_id: TARGET_SHARD_BYTES
        if shard.table
        else max(1, sum(b.num_elements for b in shard.blocks) * DTYPE_BYTES.get(shard.dtype, 4))
        for shard in layout.shards
    }


def _summary(before: JobAssignments, after: JobAssignments) -> dict[str, int]:
    """How many shards were touched in which way."""
    pairs = list(zip(before.shards, after.shards, strict=True))
    return {
        "rescued": sum(a.epoch != b.epoch for b, a in pairs),
        "recruiting": sum(a.joining != b.joining and a.joining is not None for b, a in pairs),
        "handing_over": sum(
            a.successor != b.successor and a.successor is not None for b, a in pairs
        ),
        "relieved": sum(len(a.backups) < len(b.backups) for b, a in pairs),
    }
