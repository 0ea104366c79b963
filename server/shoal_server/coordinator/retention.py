"""Retention of jobs: jobs without members end as failed, and the records of old jobs are deleted.

Each removal is one transaction: after a crash, the next sweep continues.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

import structlog

from shoal_proto.errors import JobInUse, JobQuarantined, NotLeader, RetryError
from shoal_server.coordinator.clock_mark import ClockMark
from shoal_server.coordinator.job_reset import WRITTEN_WITHIN_S, JobReset
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.persistence.stored_jobs import StoredJobs
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.coordinator.plug_in.interface import PlugIn
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import JobResult
from shoal_server.core.membership.phases import OVER
from shoal_server.core.publications.limits import HELD_S
from shoal_server.core.retention import (
    REMOVES,
    DueAction,
    RetentionLimits,
    RetentionState,
    due_action,
)
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, Operation, Put
from shoal_server.etcd.leader_store import LeaderStore

log = structlog.get_logger(__name__)

SWEEP_EACH_S = 10.0


class Retention:
    """Sweeps jobs while the coordinator leads, on its event loop."""

    def __init__(
        self,
        store: LeaderStore,
        registry: Registry,
        resetting: JobReset,
        plug_in: PlugIn,
        *,
        result_of: Callable[[str], JobResult],
        limits: RetentionLimits,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`result_of` returns what is known of a job that is over. `clock`: None for the
        registry's."""
        self._store = store
        self._registry = registry
        self._resetting = resetting
        self._plug_in = plug_in
        self._result_of = result_of
        self._limits = limits
        self._clock = clock or registry.clock
        self._mark = ClockMark(store, self._clock)
        self._may_remove = True
        """True if this coordinator's clock is trusted for removals, and all readers are known."""
        self._removes_from_s = 0.0
        self._empty_since_s: dict[str, float] = {}
        """Jobs that are not over and have no members, each with the time at which this leader first
        saw it without members."""
        self._woken = asyncio.Event()

    def changed(self, job: str) -> None:
        """Store an ended job's result soon: the next leader does not know the last loss."""
        actor = self._registry.actor_if_known(job)
        if actor is not None and actor.job.phase in OVER and actor.job.tally.result is None:
            self._woken.set()

    async def run(self) -> None:
        """Sweep periodically and on wake-up, until cancelled."""
        self._empty_since_s.clear()
        self._mark.begin()
        # Before that time, readers that the last leader knew may not have reported to this one yet.
        self._removes_from_s = self._clock() + HELD_S
        while True:
            self._woken.clear()
            await self.sweep()
            try:
                async with asyncio.timeout(SWEEP_EACH_S):
                    await self._woken.wait()
            except TimeoutError:
                pass  # the next sweep is due

    async def sweep(self) -> None:
        """Do what is due; log failures of single jobs. Raises NotLeader."""
        is_trusted = await self._mark.update_mark()
        self._may_remove = is_trusted and self._clock() >= self._removes_from_s
        await self._forget_runs()
        actors = self._registry.actors()
        self._note_empty(actors)
        for actor in actors:
            job = actor.job.spec.job
            while (what := self._due(actor)) is not DueAction.NOTHING:
                try:
                    await self._do(what, actor)
                except NotLeader:
                    raise
                except (RetryError, JobInUse) as error:
                    log.warning("job_not_swept", job=job, due=what.name, reason=str(error))
                    break
                except Exception as error:
                    log.exception("job_not_swept", job=job, due=what.name, reason=str(error))
                    break

    async def _forget_runs(self) -> None:
        if not self._may_remove:
            return
        try:
            await self._resetting.forget_runs(self._clock() - self._limits.summary_s)
        except RetryError as error:
            log.warning("earlier_runs_not_forgotten", reason=str(error))

    def _note_empty(self, actors: Iterable[JobActor]) -> None:
        now_s = self._clock()
        empty = [a.job.spec.job for a in actors if a.job.phase not in OVER and not a.job.members]
        self._empty_since_s = {job: self._empty_since_s.get(job, now_s) for job in empty}

    def _due(self, actor: JobActor) -> DueAction:
        job = actor.job
        if not self._is_known(actor):
            return DueAction.NOTHING  # removed or reset meanwhile
        age = RetentionState(
            ended_s=job.phase_since_s if job.phase in OVER else None,
            empty_since_s=None if job.members else self._empty_since_s.get(job.spec.job),
            has_result=job.tally.result is not None,
            is_cleared=job.tally.is_cleared,
        )
        what = due_action(age, self._limits, self._clock())
        if what is DueAction.FORGET and self._resetting.is_read(job.spec.job):
            what = due_action(age, replace(self._limits, summary_s=inf), self._clock())
        return what if self._may_remove or what not in REMOVES else DueAction.NOTHING

    def _is_known(self, actor: JobActor) -> bool:
        return self._registry.actor_if_known(actor.job.spec.job) is actor

    async def _do(self, what: DueAction, actor: JobActor) -> None:
        name = actor.job.spec.job
        match what:
            case DueAction.ABANDON:
                after_s = self._limits.abandon_after_s
                # Another attempt waits for the full time.
                del self._empty_since_s[name]
                await actor.abandon(f"it had no members for {after_s:g} s, and nobody came back")
            case DueAction.KEEP_RESULT:
                await self._keep_result(actor)
            case DueAction.CLEAR:
                await self._clear(actor)
            case DueAction.FORGET:
                await self._resetting.reset(name, forgets_processes=True)

    async def _keep_result(self, actor: JobActor) -> None:
        name = actor.job.spec.job
        try:
            num_samples = await self._plug_in.num_samples(name)
        except JobQuarantined as error:
            log.warning("samples_not_counted", job=name, reason=str(error))
            num_samples = None
        if not self._is_known(actor):
            return  # removed while its samples were counted
        result = self._result_of(name)
        if num_samples is not None:
            result = replace(result, num_samples=num_samples)
        await actor.keep_result(result)

    async def _clear(self, actor: JobActor) -> None:
        name = actor.job.spec.job
        async with self._registry.block_and_forget(name), self._plug_in.closed_ledger(name):
            await actor.wait_durable(WRITTEN_WITHIN_S)
            kept = await StoredJobs(self._store).state(name)
            assert kept is not None, "a job's result is stored before the job is cleared"
            cleared = replace(kept, tally=replace(actor.job.tally, is_cleared=True))
            written = await self._store.transact((), _operations(name, cleared))
            self._plug_in.forget(name)
        self._registry.keep_state_only(replace(cleared, revision=written.revision))
        log.info("job_cleared", job=name, over_for_s=self._clock() - actor.job.phase_since_s)


def _operations(job: str, cleared: StateRecord) -> list[Operation]:
    return [
        Delete(keys.generations(job), prefix=True),
        Delete(keys.shard_map(job)),
        Delete(keys.shard_map_chunks(job), prefix=True),
        Delete(keys.lineage(job)),
        Delete(keys.restored_from(job)),
        Delete(keys.history(job)),
        Delete(keys.sample_ledger(job)),
        Delete(keys.sample_deltas(job), prefix=True),
        Delete(keys.quarantined(job), prefix=True),
        Delete(keys.assignments(job), prefix=True),
        Put(keys.job_state(job), state_to_json(cleared)),
    ]
