"""Answers made of source and board; the API, the metrics and the page share them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_proto.errors import (
    Fenced,
    NotLeader,
    Unavailable,
    UnknownGeneration,
    UnknownJob,
    UnknownMember,
)
from shoal_proto.incarnation import public_id
from shoal_server.status.board import StatusBoard
from shoal_server.status.health import HealthReport
from shoal_server.status.source import StatusSource
from shoal_server.status.views import (
    EventView,
    GenerationView,
    HealthView,
    JobView,
    MemberView,
    SamplesView,
    View,
)


@dataclass(frozen=True, kw_only=True)
class JobSummary(View):
    """A job in one line."""

    job: str
    phase: str
    """collect, prepare, committed, running, aborted, finished, lost or set_aside."""
    reason: str
    """Why the job is in this phase."""
    since_unix_s: float
    generation: int
    """The newest generation number; 0 before the first."""
    num_members: int
    """Members that are there, in a generation or not."""
    num_training: int
    """Members that train."""
    step: int
    """The highest step that a member reported, those that are gone included."""


@dataclass(frozen=True, kw_only=True)
class JobDetail(View):
    """A job with its members, newest generations and samples."""

    summary: JobSummary
    min_members: int
    max_members: int
    desired_members: int
    synchronous: bool
    fields: dict[str, str]
    """What all members agreed on: strategy, schema, optimizer, backend and so on."""
    members: tuple["MemberDetail", ...]
    generations: tuple[GenerationView, ...]
    """Newest first, at most 100."""
    samples: SamplesView | None
    """Null for a job whose members do not lease samples."""


@dataclass(frozen=True, kw_only=True)
class MemberDetail(View):
    """A member with its last health report."""

    member: MemberView
    health: HealthView | None
    """Null before the first report of this incarnation."""
    losses: tuple[tuple[int, float], ...]
    """(step, loss) of its newest reports, at most 60."""


@dataclass(frozen=True, kw_only=True)
class Why(View):
    """What a member waits for."""

    job: str
    member_id: str
    state: str
    waiting_for: str
    waiting_since_unix_s: float
    waiting_s: float
    """For how long."""
    phase: str
    """The job's phase."""
    reason: str
    """Why the job is in that phase."""
    generation: int
    last_error: str
    """From the member's last health report."""
    lost_shards: tuple[str, ...]
    """What the job has lost on its parameter servers, a sentence for each shard."""


@dataclass(frozen=True, kw_only=True)
class Events(View):
    """Events in order. Ask again with `after=next_after` for what came since."""

    events: tuple[EventView, ...]
    next_after: int


class StatusQueries:
    """The one reader of a source and a board."""

    def __init__(self, source: StatusSource, board: StatusBoard) -> None:
        self.source = source
        self.board = board

    def jobs(self) -> Sequence[JobView]:
        """All jobs. Raises NotLeader where they are not known: the leader has them."""
        readiness = self.source.readiness()
        if not readiness.ready:
            raise NotLeader(
                "this coordinator does not lead",
                seen=readiness.reason,
                expected="a request to the coordinator that leads",
                details={"leader": readiness.leader},
            )
        return self.source.jobs()

    def job(self, name: str) -> JobView:
        """The job of that name. Raises UnknownJob, NotLeader."""
        jobs = {job.job: job for job in self.jobs()}
        if name not in jobs:
            raise UnknownJob(
                f"there is no job {name}",
                seen=name,
                expected=_one_of(sorted(jobs), "job"),
                fix="GET /api/v1/jobs lists the jobs.",
            )
        return jobs[name]

    def member(self, name: str, member_id: str) -> tuple[JobView, MemberView]:
        """A member and its job. Raises UnknownJob, UnknownMember."""
        job = self.job(name)
        members = {member.member_id: member for member in job.members}
        if member_id not in members:
            raise UnknownMember(
                f"job {name} has no member {member_id}",
                seen=member_id,
                expected=_one_of(sorted(members), "member"),
                fix=f"The job is lost: {job.reason}."
                if job.phase == "lost"
                else f"GET /api/v1/jobs/{name}/members lists the members.",
            )
        return job, members[member_id]

    def generation(self, name: str, number: int) -> GenerationView:
        """A decided generation. Raises UnknownJob, UnknownGeneration."""
        found = {record.generation: record for record in self.job(name).generations}
        if number not in found:
            kept = f"{min(found)} to {max(found)}" if found else "none was decided yet"
            raise UnknownGeneration(
                f"job {name} has no decided generation {number}",
                seen=str(number),
                expected=kept,
                fix=f"GET /api/v1/jobs/{name}/generations lists the newest.",
            )
        return found[number]

    def summary(self, job: JobView) -> JobSummary:
        """The job in one line."""
        return JobSummary(
            job=job.job,
            phase=job.phase,
            reason=job.reason,
            since_unix_s=job.since_unix_s,
            generation=job.generation,
            num_members=len(job.members),
            num_training=sum(member.state == "training" for member in job.members),
            step=max(
                self.board.highest_step(job.job),
                *(self.step(job, member) for member in job.members),
                0,
            ),
        )

    def step(self, job: JobView, member: MemberView) -> int:
        """The member's newest step, from heartbeat or health report."""
        health = self.board.health(job.job, member.member_id, member.public_id)
        return max(member.step, (health.step or 0) if health else 0)

    def detail(self, job: JobView) -> JobDetail:
        """The job with all that is known of it."""
        members = sorted(job.members, key=lambda m: (m.rank is None, m.rank or 0, m.member_id))
        return JobDetail(
            summary=self.summary(job),
            min_members=job.min_members,
            max_members=job.max_members,
            desired_members=job.desired_members,
            synchronous=job.synchronous,
            fields=dict(job.fields),
            members=tuple(self.member_detail(job, member) for member in members),
            generations=job.generations,
            samples=self.source.samples(job.job),
        )

    def member_detail(self, job: JobView, member: MemberView) -> MemberDetail:
        """The member with its last health report."""
        key = (job.job, member.member_id, member.public_id)
        return MemberDetail(
            member=member,
            health=self.board.health(*key),
            losses=tuple(self.board.losses(*key)),
        )

    async def why(self, name: str, member_id: str) -> Why:
        """What the member waits for. Raises UnknownJob, UnknownMember."""
        job, member = self.member(name, member_id)
        lost = await self._lost_shards(name)
        health = self.board.health(name, member_id, member.public_id)
        return Why(
            job=name,
            member_id=member_id,
            state=member.state,
            waiting_for=member.waiting_for,
            waiting_since_unix_s=member.waiting_since_unix_s,
            waiting_s=max(0.0, time.time() - member.waiting_since_unix_s),
            phase=job.phase,
            reason=job.reason,
            generation=job.generation,
            last_error=health.last_error if health else "",
            lost_shards=lost,
        )

    async def _lost_shards(self, name: str) -> tuple[str, ...]:
        try:
            shards = await self.source.shards(name)
        except Unavailable as error:
            # What the member waits for is known without etcd.
            return (f"whether shards are lost is not known: {error}",)
        return tuple(shard.told for shard in shards.lost) if shards is not None else ()

    def report(self, name: str, member_id: str, report: HealthReport) -> None:
        """Keep a health report. Raises UnknownJob, UnknownMember, Fenced."""
        job, member = self.member(name, member_id)
        process = public_id(report.incarnation)
        if member.public_id != process:
            raise Fenced(
                f"{member_id} is another process by now",
                seen=f"process {process}",
                expected=f"process {member.public_id}",
                fix="Join the job again: this process was declared lost or replaced.",
                details={"generation": str(job.generation)},
            )
        self.board.report(name, member_id, report.view(time.time()))

    def events(self, name: str, after: int, limit: int) -> Events:
        """Events with ids above `after`. Raises UnknownJob."""
        self.job(name)
        events = tuple(self.board.events(name, after=after, limit=limit))
        return Events(events=events, next_after=events[-1].id if events else after)


def _one_of(names: list[str], noun: str) -> str:
    if not names:
        return f"no {noun} is there"
    shown = ", ".join(names[:10])
    return f"one of {shown}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")
