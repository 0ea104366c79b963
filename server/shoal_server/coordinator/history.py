"""Charts of jobs, stored in etcd for the next leader.

Each second, the leader records what members of running jobs reported last. Twice a minute, it
writes each job's history to one key.
"""

import asyncio
import math
import time
from collections.abc import Mapping

import structlog

from shoal_proto.errors import RetryError, ShoalError
from shoal_proto.incarnation import public_id
from shoal_server.coordinator.jobs.job_actor import JobActor
from shoal_server.coordinator.jobs.registry import Registry
from shoal_server.coordinator.kept_history import MAX_BYTES, KeptHistory, read, written
from shoal_server.core.generations.roster import GenerationRoster
from shoal_server.core.membership.phases import OVER
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put, unchanged_since
from shoal_server.etcd.json_fields import UnreadableRecord
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.serving.tasks import gather_bounded
from shoal_server.serving.unix_clock import unix_s
from shoal_server.status.board import StatusBoard
from shoal_server.status.history.series import Reading
from shoal_server.status.views import HealthView

log = structlog.get_logger(__name__)

READ_EACH_S = 1.0
KEEP_EACH_S = 30.0
MAX_SHARE = 0.02
"""Maximum share of the event loop's time for readings."""
FRESH_S = 10.0
"""Age from which reports are ignored."""
AT_ONCE = 16


class HistoryKeeper:
    """Recorder of the history of jobs, for one term of a coordinator."""

    def __init__(self, store: LeaderStore, registry: Registry, board: StatusBoard) -> None:
        self._store = store
        self._registry = registry
        self._board = board
        self._loaded: set[str] = set()
        """Jobs whose stored history has been read."""
        self._dropped: set[str] = set()
        """Jobs among these that the board has dropped since. If one is retried, its history is read
        again."""
        self._kept: dict[str, bytes] = {}
        """History in etcd, by job."""

    async def run(self) -> None:
        """Record and store the history of jobs, until cancelled."""
        keep_s = time.monotonic() + KEEP_EACH_S
        while True:
            await self.load_histories()
            began_s = time.monotonic()
            self.record_readings()
            # The time of `record_readings` alone: `keep` waits for etcd.
            read_s = time.monotonic() - began_s
            if began_s >= keep_s:
                keep_s = began_s + KEEP_EACH_S
                await self.keep()
            await asyncio.sleep(max(READ_EACH_S, read_s / MAX_SHARE))

    def record_readings(self) -> None:
        """Record a reading of each running job with fresh reports."""
        for actor in self._registry.actors():
            roster, job = actor.job.running, actor.job.spec.job
            if roster is not None:
                known = self._board.reports(job)
                reading = _reading(roster, known, self._board.highest_step(job), unix_s())
                if reading is not None:
                    self._board.measured(job, reading)

    async def keep(self) -> None:
        """Write each changed history of at most MAX_BYTES; forget removed jobs. Logs failures."""
        gone = {job for job in self._loaded if self._registry.is_free(job)}
        self._loaded -= gone
        self._dropped -= gone
        self._kept = {job: value for job, value in self._kept.items() if job not in gone}
        await gather_bounded(self._keep_one, self._registry.actors(), AT_ONCE)

    async def load_histories(self) -> None:
        """Load from etcd the history of new jobs, and of retried ones that the board dropped."""
        self._dropped |= {job for job in self._loaded if self._board.history(job) is None}
        new = [a for a in self._registry.actors() if self._is_new(a.job.spec.job)]
        await gather_bounded(self._load_history, new, AT_ONCE)

    def _is_new(self, job: str) -> bool:
        if job in self._dropped:
            return self._board.history(job) is not None
        return job not in self._loaded

    async def _load_history(self, actor: JobActor) -> None:
        job = actor.job.spec.job
        try:
            stored = await self._store.get(keys.history(job))
        except RetryError as error:
            log.debug("history_not_read", job=job, reason=str(error))
            return
        self._loaded.add(job)
        self._dropped.discard(job)
        if stored is None:
            return
        try:
            kept = read(stored.value)
        except UnreadableRecord as error:
            # No decision depends on history: the job continues without it.
            log.warning("history_unreadable", job=job, key=stored.key, reason=str(error)[:300])
            return
        if kept.begun_unix_s == actor.job.tally.begun_s:
            self._board.restore_history(
                job,
                kept.series,
                kept.changes,
                kept.extra_s,
                logged=kept.logged,
                run=kept.run,
                last_removal=kept.last_removal,
            )
            live = {public_id(member.incarnation) for member in actor.job.members.values()}
            steps = kept.steps_by_process
            gone_steps = kept.gone_steps + sum(n for each, n in steps.items() if each not in live)
            self._board.restore_steps(job, gone_steps, {each: steps.get(each, 0) for each in live})
            self._kept[job] = stored.value

    async def _keep_one(self, actor: JobActor) -> None:
        job = actor.job.spec.job
        known = self._board.history(job)
        is_over = actor.job.phase in OVER and actor.job.tally.is_cleared
        is_continued = job in self._loaded and job not in self._dropped
        if known is None or is_over or not is_continued:
            return
        reports, series = known
        gone_steps, steps_by_process = self._board.steps_to_keep(job)
        value = written(
            KeptHistory(
                begun_unix_s=actor.job.tally.begun_s,
                series=series.view(),
                changes=tuple(reports.changes),
                extra_s=reports.extra_s,
                logged=self._board.logged(job).view(),
                run=self._board.run_origin(job),
                gone_steps=gone_steps,
                steps_by_process=steps_by_process,
                last_removal=self._board.last_removal_reason(job),
            )
        )
        if value == self._kept.get(job) or len(value) > MAX_BYTES:
            return
        try:
            state = await self._store.get(keys.job_state(job))
            if state is None:
                return  # the job has no record yet, or no longer
            still = unchanged_since(state.key, state.mod_revision)
            result = await self._store.transact([still], [Put(keys.history(job), value)])
        except ShoalError as error:
            log.debug("history_not_kept", job=job, reason=str(error))
            return
        if result.succeeded:
            self._kept[job] = value


def _reading(
    roster: GenerationRoster, known: Mapping[str, HealthView], step: int, now_unix_s: float
) -> Reading | None:
    fresh = {
        entry.rank: health
        for entry in roster.entries
        if (health := known.get(entry.member_id)) is not None
        and health.received_unix_s > now_unix_s - FRESH_S
        and health.public_id == public_id(entry.incarnation)
    }
    if not fresh:
        return None
    figures = fresh.values()
    return Reading(
        generation=roster.generation,
        step=step,
        losses=[x for each in figures if (x := _finite(each.loss)) is not None],
        samples_per_s=[x for each in figures if (x := _finite(each.samples_per_s)) is not None],
        staleness=[x for each in figures if (x := _finite(each.staleness_steps)) is not None],
        step_s={
            rank: x for rank, each in fresh.items() if (x := _finite(each.step_time_s)) is not None
        },
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
