"""Registry of all jobs of one coordinator, each with its actor."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import structlog

from shoal_proto.errors import (
    AccessDenied,
    InvalidSpec,
    JobQuarantined,
    NotLeader,
    Overloaded,
    RetryError,
    ShoalError,
    Unavailable,
    UnknownJob,
)
from shoal_proto.short_lists import short_list
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator.jobs.job_actor import JobActor, JobDependencies
from shoal_server.coordinator.jobs.proofs import check_member
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.earlier_runs import EarlierRuns, check_unused
from shoal_server.coordinator.persistence.quarantine import Quarantine
from shoal_server.coordinator.persistence.stored_generations import (
    StoredGenerations,
    size_problem,
)
from shoal_server.coordinator.persistence.stored_jobs import READS_AT_ONCE, StoredJob
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.processes import MemberProcess
from shoal_server.etcd import keys
from shoal_server.etcd.api import Delete
from shoal_server.etcd.repeat import until_answered
from shoal_server.serving.tasks import gather_bounded, run_until_done

log = structlog.get_logger(__name__)


Prepare = Callable[[str], Awaitable[None]]
Found = TypeVar("Found")

BACKGROUND_READS_AT_ONCE = 4
"""Few, since callers are served at the same time."""
MAX_SHOWN = 20


async def _nothing(job: str) -> None:
    """Do nothing: the default of `prepare`."""


class KnownLeader:
    """The leading coordinator, as this one knows it."""

    def __init__(self) -> None:
        self.address = ""
        """host:port; empty if no other coordinator is known to lead."""
        self.why_nobody = "no coordinator leads yet: etcd has not answered"
        self.num_changes = 0
        """Number of leader changes seen."""
        self._newest = ""

    def note(self, address: str) -> None:
        """Count a change of leader. `address`: empty without a leader."""
        if address and self._newest and address != self._newest:
            self.num_changes += 1
        self._newest = address or self._newest

    def __str__(self) -> str:
        return f"the coordinator at {self.address} leads" if self.address else self.why_nobody

    def not_leader(self) -> NotLeader:
        """Error for a caller of this coordinator."""
        return NotLeader(
            "this coordinator does not lead",
            seen=str(self),
            expected=f"a call to {self.address}" if self.address else "a leader to be elected",
            details={"leader": self.address},
        )


class Registry:
    """Jobs and their actors, served from `begin`, which follows `read`, to `step_down`."""

    def __init__(self, dependencies: JobDependencies, limits: Limits) -> None:
        self._dependencies = dependencies
        self.limits = limits
        self._actors: dict[str, JobActor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unread: dict[str, StateRecord] = {}
        """Unfinished jobs that are not read yet."""
        self._finished: list[StateRecord] = []
        self._read_ahead: list[StoredJob] = []
        self._quarantine = Quarantine(dependencies.clock, dependencies.board.event)
        self._prepare: Prepare = _nothing
        self._reading: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self.earlier_runs: dict[str, EarlierRuns] = {}
        """Earlier runs of reset jobs, read before `begin`."""
        self._resetting: set[str] = set()
        self._leads = False
        self.known_leader = KnownLeader()

    @property
    def leads(self) -> bool:
        return self._leads

    async def read(self, prepare: Prepare) -> None:
        """Read every job that has members, and call `prepare` for each; of other jobs, only the
        state record.

        Deletes stray keys of members. Raises what the store raises.
        """
        survey = await self._dependencies.stored.survey()
        for name, why in survey.quarantined.items():
            self.quarantine(name, why)
        states = {n: state for n, state in survey.states.items() if n not in self._quarantine}
        self._unread = {n: state for n, state in states.items() if not state.finished}
        self._finished = [state for state in states.values() if state.finished]
        self._prepare = prepare
        await self._dependencies.jobs.apply_all([Delete(key) for key in survey.strays])
        attended = [name for name in self._unread if name in survey.attended]
        read = await gather_bounded(self._read, attended, READS_AT_ONCE)
        self._read_ahead = [stored for stored in read if stored is not None]

    def begin(self) -> list[JobActor]:
        """Serve jobs, start their timers, and read the other jobs in the background. Returns the
        actors of the jobs that were read whole."""
        now_s = self._dependencies.clock()
        taken = [self._take_up(stored, now_s) for stored in self._read_ahead]
        for state in self._finished:
            self._add_finished(state, now_s)
        self._read_ahead = []
        self._leads = True
        log.info("coordinator_leading", jobs=len(self._actors), unread=len(self._unread))
        self._reading = asyncio.ensure_future(run_until_done(self._read_rest, "reading-jobs"))
        return [actor for actor in taken if actor is not None]

    def _add_finished(self, state: StateRecord, now_s: float) -> JobActor:
        read = partial(self._dependencies.stored.records, state.spec.job)
        job = self._job_of(state, now_s)
        return self._add(JobActor(job, self._dependencies, read_records=read), state)

    def _job_of(self, state: StateRecord, now_s: float) -> Job:
        job = StoredJob(state=state, records=(), members={}, generations=StoredGenerations())
        return job.restored_job(self.limits, now_s)

    def keep_state_only(self, state: StateRecord) -> None:
        """Add a job that is over, of which only the state record is left. Does nothing if this
        coordinator does not lead."""
        if self._leads:
            self._add_finished(state, self._dependencies.clock())

    async def _read(self, name: str) -> StoredJob | None:
        try:
            stored = await self._dependencies.stored.load(self._unread[name])
            await self._prepare(name)
        except (RetryError, AccessDenied):
            raise
        except Exception as error:  # noqa: BLE001 - raised to all callers of this job
            self.quarantine(name, error)
            return None
        return stored

    def _take_up(self, stored: StoredJob, now_s: float) -> JobActor | None:
        name = stored.state.spec.job
        try:
            job = stored.restored_job(self.limits, now_s)
        except Exception as error:  # noqa: BLE001 - raised to all callers of this job
            self.quarantine(name, error)
            return None
        self._unread.pop(name, None)
        return self._add(
            JobActor(job, self._dependencies, stored.records, generations=stored.generations),
            stored.state,
        )

    async def _read_rest(self) -> None:
        await gather_bounded(self._read_in_background, list(self._unread), BACKGROUND_READS_AT_ONCE)
        finished = [state.spec.job for state in self._finished if not state.tally.is_cleared]
        await gather_bounded(self._fill, finished, BACKGROUND_READS_AT_ONCE)
        self._finished = []

    async def _read_in_background(self, name: str) -> None:
        stored = await _until_read(partial(self._read, name))
        if stored is not None:
            self._take_up(stored, self._dependencies.clock())

    async def _fill(self, name: str) -> None:
        actor = self._actors.get(name)
        if actor is None:
            return
        try:
            await _until_read(actor.records.fill)
            await _until_read(partial(self._prepare, name))
        except ShoalError as error:
            # The error concerns only callers that request these records.
            log.warning("finished_job_unreadable", job=name, reason=str(error))

    def quarantine(self, name: str, error: Exception) -> JobQuarantined:
        """Quarantine a job that cannot continue. Returns the error for its callers."""
        actor, task = self._actors.pop(name, None), self._tasks.pop(name, None)
        self._unread.pop(name, None)
        why = self._quarantine.quarantine(name, error)
        if task is not None:
            task.cancel()
        if actor is not None:
            ending = asyncio.ensure_future(actor.end(why))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        return why

    @property
    def quarantined(self) -> Mapping[str, tuple[JobQuarantined, float]]:
        """Quarantined jobs, with the reason and the start (Unix seconds)."""
        return self._quarantine.jobs

    async def resume_quarantined(self, name: str) -> JobActor | None:
        """Continue a quarantined job from its records in etcd; None if etcd has none. A job that is
        not quarantined is unchanged.

        Raises JobQuarantined if it still cannot continue, Unavailable, NotLeader.
        """
        self.require_leading()
        self.require_settled(name)
        state = await self._dependencies.stored.state(name)
        if name not in self._quarantine:
            return self._actors.get(name)
        why, _ = self.quarantined[name]
        self._quarantine.release(name)
        if state is None:
            return None
        if state.finished:
            return self._add_finished(state, self._dependencies.clock())
        self._unread[name] = state
        try:
            stored = await self._read(name)
        except BaseException:  # also the cancellation of the call
            if self._unread.get(name) is state:
                self.quarantine(name, why)
            raise
        self._quarantine.check(name)
        if stored is None or self._unread.get(name) is not state:
            raise self.known_leader.not_leader()  # stepped down meanwhile
        actor = self._take_up(stored, self._dependencies.clock())
        self._quarantine.check(name)
        return actor

    def refuse_calls(self) -> None:
        """Refuse all further calls with NotLeader, until `begin`."""
        self._leads = False

    async def step_down(self) -> None:
        """End all actors."""
        self.refuse_calls()
        tasks = [*self._tasks.values(), *filter(None, (self._reading,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for actor in self.actors():
            await actor.end()
        # Last: while actors end, failing writes may quarantine jobs.
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._reading = None
        for table in (self._tasks, self._actors, self._unread, self._quarantine):
            table.clear()

    def require_leading(self) -> None:
        if not self._leads:
            raise self.known_leader.not_leader()

    def actors(self) -> list[JobActor]:
        return list(self._actors.values())

    def unread_jobs(self) -> list[Job]:
        """Jobs that are still being read, as their state records describe them: without members and
        generations."""
        states = self._unread.values() if self._leads else ()
        return [self._job_of(state, self._dependencies.clock()) for state in states]

    def find(self, job: str) -> JobActor:
        """The job's actor. Raises UnknownJob, NotLeader, JobQuarantined or Unavailable."""
        self.require_leading()
        self._require_usable(job)
        try:
            return self._actors[job]
        except KeyError:
            raise UnknownJob(
                f"there is no job {job!r}",
                seen=f"{len(self._actors)} jobs" if self._actors else "no job at all yet",
                expected=_one_of(sorted(self._actors)),
                fix="Check the spelling. A job is made by the first worker that joins it:"
                " `shoal run --job NAME ...`; `shoal status` lists all.",
            ) from None

    def _require_usable(self, job: str) -> None:
        self._quarantine.check(job)
        self.require_settled(job)

    def require_settled(self, job: str) -> None:
        """Raise Unavailable while the job is being read, reset or cleared."""
        if job in self._unread:
            raise Unavailable(f"job {job} is being read from etcd", expected="a retry in a moment")
        if job in self._resetting:
            raise Unavailable(
                f"job {job} is being reset or cleared", expected="a retry in a moment"
            )

    def actor_if_known(self, job: str) -> JobActor | None:
        return self._actors.get(job)

    async def secret_digest(self, job: str) -> str:
        """Digest of the secret of a job, which may be quarantined; empty if there is none. Raises
        NotLeader, and Unavailable while etcd cannot be reached."""
        self.require_leading()
        if (actor := self._actors.get(job)) is not None:
            return actor.job.spec.secret_digest
        return await self._dependencies.stored.secret_digest(job)

    def is_free(self, name: str) -> bool:
        tables = (self._actors, self._unread, self._resetting)
        return name not in self._quarantine and not any(name in each for each in tables)

    def find_or_create(self, spec: JobSpec) -> JobActor:
        """The job's actor, made for its first worker. Raises NotLeader, JobQuarantined,
        Unavailable, and Overloaded if there are too many jobs."""
        self.require_leading()
        self._require_usable(spec.job)
        if spec.job not in self._actors:
            self._check_capacity()
            job = Job(
                spec=spec,
                limits=self.limits,
                digest_of=codec.digest_of,
                size_problem=size_problem,
                phase_since_s=self._dependencies.clock(),
            )
            self._add(JobActor(job, self._dependencies))
        return self._actors[spec.job]

    def _check_capacity(self) -> None:
        known, most = len(self._actors) + len(self._unread), self._dependencies.max_jobs
        if known >= most:
            raise Overloaded(
                "this cluster already has the maximum number of jobs",
                seen=f"{known} jobs, including ended ones",
                expected=f"fewer than {most}",
                fix="`shoal rm JOB` removes one; or start the coordinator with more --max-jobs,"
                " or keep ended jobs for a shorter time.",
            )

    async def authorize(self, token: Token) -> None:
        """Raise what `find_for` and `JobActor.authorize` raise unless the token is a current
        member's."""
        self.find_for(token).authorize(token)

    def find_for(self, token: Token) -> JobActor:
        """Actor of the token's job. Raises what `find` raises, JobFinished for a token of an
        earlier run, and AccessDenied without the job's secret."""
        actor = self.find(token.job)
        self.check_run(token)
        check_member(actor.job.spec, token.job_secret, has_members=False)
        return actor

    def check_run(self, token: Token) -> None:
        """Raise JobFinished for a token of an earlier run of a reset job."""
        earlier = self.earlier_runs.get(token.job)
        if earlier is not None and (refusal := earlier.refusal(token)):
            raise codec.refusal_to_error(refusal, earlier.last_generation)

    @asynccontextmanager
    async def block_and_forget(self, job: str) -> AsyncIterator[JobActor | None]:
        """Refuse all calls for the job during the block, then drop it unless the block raised.
        Yields its actor, if any.

        Raises JobInUse if the job has members, NotLeader, and Unavailable if the job is being read
        or reset.
        """
        self.require_leading()
        self.require_settled(job)
        actor = self._actors.get(job)
        if actor is not None:
            check_unused(job, actor.job.members)
        self._resetting.add(job)
        try:
            yield actor
            self._quarantine.release(job)
            self._dependencies.board.reset_reports(job)
            if actor is not None and self._actors.get(job) is actor:
                await self._drop(actor)
        finally:
            self._resetting.discard(job)

    async def drop_if_empty(self, actor: JobActor) -> None:
        """Drop a job without members, streams or a record in etcd."""
        job = actor.job
        name, is_known = job.spec.job, self._actors.get(job.spec.job) is actor
        is_empty = not job.members and not actor.has_open_stream and not actor.is_writing
        if is_known and is_empty and not self._dependencies.jobs.has_written(name):
            await self._drop(actor)

    async def _drop(self, actor: JobActor) -> None:
        name = actor.job.spec.job
        del self._actors[name]
        self._dependencies.jobs.forget(name)
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
        await actor.end()

    async def retry(self, job: str, *, from_scratch: bool) -> JobActor:
        """Allow members to join a job that is over, or, with `from_scratch`, interrupted: then
        without its reports and charts. Raises what `find`, `JobActor.retry` and the store raise,
        and InvalidSpec with `from_scratch` if the cluster has the job's parameters or samples."""
        actor = self.find(job)
        takes_retry = actor.job.retry_refusal is None
        if from_scratch and takes_retry and await self._dependencies.stored.is_kept_on_servers(job):
            raise InvalidSpec(
                f"job {job} cannot begin at step 0: its members would continue from its state",
                seen="parameters on servers, or a sample ledger",
                expected="a job without either",
                fix=f"`shoal run --fresh` starts it over; `shoal retry {job}` lets it continue.",
            )
        progress_before = actor.job.progress
        try:
            await actor.retry("an operator lets members join again", from_scratch=from_scratch)
        finally:
            # Also if the call is cancelled: it may have been decided, and the job needs its timers.
            if actor.job.progress is not progress_before:
                self._dependencies.board.reset_reports(job)
            task = self._tasks.get(job)
            if (task is None or task.done()) and self._actors.get(job) is actor:
                self._run(actor)
        if from_scratch:
            await self._dependencies.jobs.apply([Delete(keys.history(job))])
        return actor

    async def declare_lost(self, job: str, who: MemberProcess, reason: str) -> None:
        """Declare the member lost. Raises what `find` raises, Fenced or the member's refusal, and
        the error that ended the job's actor."""
        await self.find(job).submit(events.MemberLost(**who._asdict(), reason=reason))

    @property
    def clock(self) -> Callable[[], float]:
        """Clock of all jobs: Unix seconds that never jump."""
        return self._dependencies.clock

    def _add(self, actor: JobActor, stored: StateRecord | None = None) -> JobActor:
        name = actor.job.spec.job
        self._dependencies.jobs.keep(name, stored)
        if earlier := self.earlier_runs.get(name):
            earlier.prepare_run(actor.job)
        self._actors[name] = actor
        self._run(actor)
        return actor

    def _run(self, actor: JobActor) -> None:
        name = actor.job.spec.job
        task = asyncio.ensure_future(actor.run())
        task.add_done_callback(lambda done: self._actor_ended(name, done))
        self._tasks[name] = task

    def _actor_ended(self, name: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if isinstance(error, Exception):
            self.quarantine(name, error)


def _one_of(names: list[str]) -> str:
    return f"one of {short_list(names, MAX_SHOWN)}" if names else "the name of an existing job"


async def _until_read(work: Callable[[], Awaitable[Found]]) -> Found:
    """Read from etcd; retry while it does not answer or denies access."""
    return await until_answered(
        work,
        lambda error: log.warning("job_not_read_yet", reason=str(error)),
        lambda error: isinstance(error, RetryError | AccessDenied),
    )
