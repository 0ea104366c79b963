"""All jobs of one coordinator, each with an actor of its own."""

import asyncio
import time
from collections.abc import Callable

import structlog

from shoal_proto.errors import NotLeader, UnknownJob
from shoal_proto.v1.identity_pb2 import Token
from shoal_server.coordinator import codec
from shoal_server.coordinator.job_actor import JobActor, Surroundings
from shoal_server.core import events
from shoal_server.core.clocks import Who
from shoal_server.core.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.restore import restored
from shoal_server.core.roster import JobSpec

log = structlog.get_logger(__name__)


def steady_unix_clock() -> Callable[[], float]:
    """Unix seconds that never jump: the wall clock at the start, the monotonic one from there."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


class Registry:
    """Serves only while it leads; `lead` loads what the store holds, `step_down` forgets it."""

    def __init__(self, surroundings: Surroundings, limits: Limits) -> None:
        self._around = surroundings
        self.limits = limits
        self._actors: dict[str, JobActor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leads = False
        self.leader = ""
        """host:port of the coordinator that leads, as far as this one knows."""

    @property
    def leads(self) -> bool:
        return self._leads

    async def lead(self) -> None:
        """Take over every job that the store knows."""
        for name in await self._around.jobs.names():
            loaded = await self._around.jobs.load(name, self._around.clock())
            if loaded is None:
                continue
            job = restored(
                loaded.spec,
                loaded.saved,
                limits=self.limits,
                digest_of=codec.digest_of,
                now_s=self._around.clock(),
            )
            actor = JobActor(job, self._around, loaded.records)
            await actor.keep_members(loaded.leased)
            self._add(actor)
        self._leads = True
        log.info("leading", jobs=len(self._actors))

    async def step_down(self) -> None:
        """Stop serving: another coordinator leads, or this one ends."""
        self._leads = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for actor in self._actors.values():
            await actor.end()
        self._tasks.clear()
        self._actors.clear()

    def require_leading(self) -> None:
        if not self._leads:
            raise NotLeader(
                "this coordinator does not lead",
                expected=f"a call to {self.leader}" if self.leader else "a leader to be elected",
                details={"leader": self.leader},
            )

    def actors(self) -> list[JobActor]:
        return list(self._actors.values())

    def find(self, job: str) -> JobActor:
        """The job's actor. Raises UnknownJob, NotLeader."""
        self.require_leading()
        try:
            return self._actors[job]
        except KeyError:
            known = ", ".join(sorted(self._actors)) or "none yet"
            raise UnknownJob(f"there is no job {job!r}", seen=job, expected=known) from None

    def actor_if_known(self, job: str) -> JobActor | None:
        return self._actors.get(job)

    def find_or_create(self, spec: JobSpec) -> JobActor:
        """The job's actor, made on the first worker's arrival."""
        self.require_leading()
        if spec.job not in self._actors:
            job = Job(
                spec=spec,
                limits=self.limits,
                digest_of=codec.digest_of,
                phase_since_s=self._around.clock(),
            )
            self._add(JobActor(job, self._around))
        return self._actors[spec.job]

    async def authorize(self, token: Token) -> None:
        """Raise Fenced unless the token's incarnation is a member of its job now."""
        self.find(token.job).authorize(token)

    async def declare_lost(self, job: str, who: Who, reason: str) -> None:
        """Take the member out. Raises Fenced for who is none any more, UnknownJob, NotLeader."""
        await self.find(job).submit(events.Lost(**who._asdict(), reason=reason))

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of all jobs: Unix seconds that never jump."""
        return self._around.clock

    def _add(self, actor: JobActor) -> None:
        name = actor.job.spec.job
        self._actors[name] = actor
        task = asyncio.ensure_future(actor.run())
        task.add_done_callback(lambda done: self._actor_ended(name, done))
        self._tasks[name] = task

    def _actor_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        # A job whose clock stopped would hang its members: better that another replica leads.
        log.error("job_actor_failed", job=name, error=repr(error))
        self._around.on_lost_leadership(f"the actor of job {name} failed: {error!r}")
