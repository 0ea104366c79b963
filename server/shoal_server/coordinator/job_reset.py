"""Reset of a job: one transaction deletes all its keys, so that its name is free.

The job's published versions are dropped first. Servers drop shards without a record, and calls from
earlier runs are refused (`EarlierRuns`).
"""

from collections.abc import Sequence

import structlog

from shoal_proto.errors import InternalError, RetryError, ShoalError
from shoal_server.coordinator.jobs.outputs import OutputsService
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.persistence.durable import DurableJobs
from shoal_server.coordinator.persistence.earlier_runs import EarlierRuns, check_unused, from_json
from shoal_server.coordinator.persistence.quarantine import unreadable
from shoal_server.coordinator.persistence.stored_json import name_in_key
from shoal_server.coordinator.plug_in.interface import PlugIn
from shoal_server.coordinator.publications.service import WeightSeriesService
from shoal_server.coordinator.rendezvous import RendezvousService
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete, KeyValue, Operation, Put
from shoal_server.etcd.json_fields import Fields, UnreadableRecord, as_unreadable
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.serving.unix_clock import unix_s

log = structlog.get_logger(__name__)

WRITTEN_WITHIN_S = 10.0
REPEATED_WITHIN_S = 30.0
"""Time after a reset within which another one counts as its repetition: a client repeats its call
for this long, and the first answer may have been lost."""
FORGOTTEN_AT_ONCE = 100


class JobReset:
    """Resets jobs, on the coordinator's event loop."""

    def __init__(
        self,
        store: LeaderStore,
        jobs: DurableJobs,
        registry: Registry,
        plug_in: PlugIn,
        *,
        rendezvous: RendezvousService,
        outputs: OutputsService,
        weights: WeightSeriesService,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._registry = registry
        self._plug_in = plug_in
        self._rendezvous = rendezvous
        self._outputs = outputs
        self._weights = weights

    async def read(self) -> None:
        """Read which jobs were reset. Call it before the registry takes over jobs."""
        earlier_runs = {}
        for item in (await self._store.range(keys.RESETS)).items:
            job = name_in_key(keys.RESETS, item.key)
            if job is None:
                log.warning("key_of_no_job", key=item.key)
                continue
            try:
                with as_unreadable():
                    earlier_runs[job] = from_json(job, item.value)
            except (UnreadableRecord, InternalError) as error:
                # No process may join: the expelled incarnations are unknown.
                self._registry.quarantine(job, unreadable(job, item.key, error))
        self._registry.earlier_runs = earlier_runs

    async def reset(self, job: str, *, forgets_processes: bool = False) -> bool:
        """Delete the job's state. Returns True if it had any state or published versions, or was
        reset less than REPEATED_WITHIN_S ago.

        `forgets_processes`: True to keep no record of earlier runs, once none of their processes
        can return; series that plain scripts publish then stay. Raises JobInUse while the job has
        members, Unavailable while etcd cannot be reached or the job is being read or reset,
        NotLeader, and the error of the job's last write. After an error, published versions may be
        gone; so may all keys, if only etcd's answer was lost.
        """
        known = self._registry.earlier_runs.get(job)
        async with self._registry.block_and_forget(job) as actor, self._plug_in.closed_ledger(job):
            if actor is not None:
                # A pending write of the old run must not land after the deletion.
                await actor.wait_durable(WRITTEN_WITHIN_S)
            held = (await self._store.range(keys.job_prefix(job))).items
            members = (await self._store.range(keys.members(job))).items
            names = [each.key.removeprefix(keys.members(job)) for each in members]
            is_quarantined = job in self._registry.quarantined
            check_unused(job, names, is_quarantined=is_quarantined)
            # A job may be quarantined only because its record of earlier runs is unreadable. That
            # record is replaced.
            existed = bool(held) or actor is not None or is_quarantined
            had_weights = await self._weights.clear(job, forgets_numbers=forgets_processes)
            if not existed:
                # A plain script may have published under this name.
                return had_weights or (known is not None and _is_recent(known))
            earlier = known or EarlierRuns(job=job)
            # Kept series refuse earlier generations, also if no record of earlier runs is readable.
            last_generation, expelled = self._weights.last_generation(job), list[str]()
            if actor is not None:
                last_generation = max(last_generation, actor.job.last_generation)
                expelled = list(actor.job.table.expelled)
            else:
                # Only etcd has the last generation of a job that was not taken over.
                last_generation = max(last_generation, _newest_generation(job, held))
            earlier = earlier.with_run(last_generation, expelled)
            await self._jobs.apply(_operations(earlier, keeps_runs=not forgets_processes))
            if forgets_processes:
                self._registry.earlier_runs.pop(job, None)
            else:
                self._registry.earlier_runs[job] = earlier
            self._plug_in.forget(job)
        self._rendezvous.drop_dead(job)
        self._outputs.forget(job)
        log.info("job_reset", job=job, last_generation=earlier.last_generation)
        return True

    def is_read(self, job: str) -> bool:
        """True if a series that the job's runs published is in use. Such a series has to keep its
        numbers, since readers ignore lower ones."""
        return any(
            not (each.is_idle or each.series.head.publisher.script)
            for each in self._weights.series_of(job)
        )

    async def forget_runs(self, before_unix_s: float) -> None:
        """Delete the record of earlier runs of each unused name that was last reset before
        `before_unix_s`, and what is left of the series that these runs published, since such a
        series would refuse the next run, whose generations are numbered from 1 again. Both stay
        while such a series is in use.

        Raises Unavailable while etcd cannot be reached, and NotLeader.
        """
        known = self._registry.earlier_runs
        old = [
            earlier
            for name, earlier in list(known.items())
            if 0 < earlier.ended_unix_s < before_unix_s
            and self._registry.is_free(name)
            and not self.is_read(name)
            and await self._forget_series(name)
        ]
        for start in range(0, len(old), FORGOTTEN_AT_ONCE):
            part = old[start : start + FORGOTTEN_AT_ONCE]
            # Earlier runs have no process left, even if a job of that name starts meanwhile.
            await self._jobs.apply([Delete(keys.reset(each.job)) for each in part])
            for each in part:
                if known.get(each.job) is each:
                    del known[each.job]

    async def _forget_series(self, job: str) -> bool:
        if not self._weights.series_of(job):
            return True
        try:
            async with self._registry.block_and_forget(job):
                await self._weights.clear(job, forgets_numbers=True)
        except RetryError:
            raise
        except ShoalError as error:
            log.warning("series_not_forgotten", job=job, reason=str(error))
            return False
        return True


def _is_recent(earlier: EarlierRuns) -> bool:
    # The clock of another coordinator may be ahead.
    return abs(unix_s() - earlier.ended_unix_s) < REPEATED_WITHIN_S


def _newest_generation(job: str, held: Sequence[KeyValue]) -> int:
    numbers = (keys.generation_number(job, each.key) for each in held)
    generations = [number for number in numbers if number is not None]
    for each in held:
        if each.key == keys.job_state(job):
            try:
                generations.append(Fields.parsed(each.value).count("last_generation"))
            except UnreadableRecord as error:
                log.warning("job_state_unreadable", job=job, reason=str(error))
    return max(generations, default=0)


def _operations(earlier: EarlierRuns, *, keeps_runs: bool) -> list[Operation]:
    job = earlier.job
    runs = Put(keys.reset(job), earlier.to_json()) if keeps_runs else Delete(keys.reset(job))
    return [
        Delete(keys.job_prefix(job), prefix=True),
        Delete(keys.assignments(job), prefix=True),
        Delete(keys.quarantined(job), prefix=True),
        runs,
    ]
