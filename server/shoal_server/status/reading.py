"""Queries over source and board, shared by the API, the metrics and the page."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal_proto.errors import (
    Fenced,
    NotLeader,
    Unavailable,
    UnknownGeneration,
    UnknownJob,
    UnknownMember,
)
from shoal_proto.health import RunOrigin
from shoal_proto.incarnation import public_id
from shoal_server.serving.json_view import View
from shoal_server.status.board import StatusBoard
from shoal_server.status.health import HealthReport
from shoal_server.status.history.records import ChangeView, LoggedView, SeriesView
from shoal_server.status.history.series import Series
from shoal_server.status.hyperparameters import hyperparameters
from shoal_server.status.source import StatusSource
from shoal_server.status.views import (
    OVER,
    EventView,
    GenerationView,
    HealthView,
    JobView,
    MemberView,
    PublishedSeriesView,
    SamplesView,
)

SHOWN_PHASES: Mapping[str, str] = {
    "collect": "waiting",
    "prepare": "starting",
    "committed": "starting",
    "aborted": "starting",
}
"""States that people see in the phases before training."""


@dataclass(frozen=True, kw_only=True)
class JobSummary(View):
    """A job in one line."""

    job: str
    phase: str
    """collect, prepare, committed, running, aborted, finished, failed, stopped, lost or
    quarantined."""
    state: str
    """running (it has members), waiting (it has none, and has not trained), interrupted (it has
    trained, and has none now), finished, failed, stopped, lost or quarantined."""
    shown_state: str
    """The state as people see it; for a running job: waiting, starting or running, by phase."""
    reason: str
    """Reason for the job's phase."""
    since_unix_s: float
    generation: int
    """The newest generation number; 0 before the first."""
    num_members: int
    """Members of the job, in a generation or not."""
    num_training: int
    """Members that train."""
    step: int
    """Highest step that a member reported; if members train at their own pace, the sum of their
    steps. Members that are gone are included."""
    begun_unix_s: float
    """Time at which the first member joined."""
    ended_unix_s: float
    """Time at which the job ended; 0 before that."""
    num_restarts: int
    """Number of times that training broke because a member was lost or a collective failed."""
    loss: float | None
    """Loss that was reported last; null if none was, or if the job has not ended and the report
    went to an earlier leader."""
    num_samples: int | None
    """Samples that were trained on, over all epochs; null if members do not lease samples, or if
    the number is not known here."""
    goodput: float | None
    """Share of the job's life in which it trained: generations ran, and members did not pause for a
    change. Null before the first member joined."""
    last_ending: str = ""
    """Reason for which the last member of an interrupted job was removed; else empty."""


@dataclass(frozen=True, kw_only=True)
class CourseView(View):
    """Progress of a job, and the state that it would continue from."""

    num_steps: int | None = None
    """Total number of steps; null if members train at their own pace."""
    progress: float | None = None
    """Share of the job's steps, or of its samples, that is done; null if unknown."""
    eta_s: float | None = None
    """Estimated seconds to the job's end: at its recent pace if its number of steps is known, else
    at its mean pace since it began; null if unknown."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint that members have reported."""
    checkpoint_unix_s: float | None = None
    """Time at which members first reported that checkpoint; null if this coordinator took over
    later."""
    checkpoint_bytes: int | None = None
    """Bytes of that checkpoint, of all members together; null if unknown."""
    writes_checkpoints: bool | None = None
    """True if the members write checkpoints; null if no member has reported it."""
    snapshot_unix_s: float | None = None
    """Time of the newest snapshot that this coordinator has taken."""
    logged: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Step and newest value of each name that the script logged."""


@dataclass(frozen=True, kw_only=True)
class JobDetail(View):
    """A job with its members, newest generations and samples."""

    summary: JobSummary
    min_members: int
    max_members: int
    desired_members: int
    synchronous: bool
    fields: dict[str, str]
    """Settings that all members agreed on: strategy, schema, optimizer, backend and so on."""
    members: tuple["MemberDetail", ...]
    generations: tuple[GenerationView, ...]
    """Newest first, at most 100."""
    samples: SamplesView | None
    """Null for a job whose members do not lease samples, or whose ledger is not open."""
    course: CourseView = field(default_factory=CourseView)
    """Progress of the job."""
    weights: tuple[PublishedSeriesView, ...] = ()
    """The series of weights that the job publishes."""
    run: RunOrigin | None = None
    """Command line and git commit of its script; null if no member has reported them."""
    hyperparameters: dict[str, str] = field(default_factory=dict)
    """The agreed fields that decide what is trained, with the settings of the optimizer one by
    one."""


@dataclass(frozen=True, kw_only=True)
class MemberDetail(View):
    """A member with its last health report."""

    member: MemberView
    health: HealthView | None
    """Null before the first report of this incarnation."""
    losses: tuple[tuple[int, float], ...]
    """(step, loss) of its newest reports, at most 60."""


@dataclass(frozen=True, kw_only=True)
class WaitView(View):
    """Reason for which a member waits."""

    job: str
    member_id: str
    state: str
    waiting_for: str
    waiting_since_unix_s: float
    waiting_s: float
    """Time for which the member has waited."""
    phase: str
    """The job's phase."""
    shown_state: str
    """The job's state as in JobSummary."""
    reason: str
    """Reason for the job's phase."""
    generation: int
    last_error: str
    """Error in the member's last health report; empty without one."""
    lost_shards: tuple[str, ...]
    """Lost shards of the job; one paragraph for shards that were lost together."""


@dataclass(frozen=True, kw_only=True)
class EventsView(View):
    """Events in order. A request with `after=next_after` returns the later ones."""

    events: tuple[EventView, ...]
    next_after: int


@dataclass(frozen=True, kw_only=True)
class HistoryView(View):
    """History of a job, in figures over time."""

    series: SeriesView
    changes: tuple[ChangeView, ...]
    """Changes from one generation to the next, the newest last; at most 100."""
    logged: tuple[LoggedView, ...] = ()
    """Values that the script logged; at most 32 names, in the order of their first values."""


class StatusQueries:
    """Queries over a source and a board."""

    def __init__(self, source: StatusSource, board: StatusBoard) -> None:
        self.source = source
        self.board = board

    def jobs(self) -> Sequence[JobView]:
        """List all jobs, without their generations. Raises NotLeader unless this coordinator leads:
        only the leader knows them."""
        self._require_ready()
        return self.source.jobs()

    def _require_ready(self) -> None:
        readiness = self.source.readiness()
        if not readiness.ready:
            raise NotLeader(
                "this coordinator does not lead",
                seen=readiness.reason,
                expected="a request to the coordinator that leads",
                details={"leader": readiness.leader},
            )

    def job(self, name: str) -> JobView:
        """The job of that name. Raises UnknownJob, NotLeader."""
        self._require_ready()
        job = self.source.job(name)
        if job is None:
            raise UnknownJob(
                f"there is no job {name}",
                seen=name,
                expected=_one_of(sorted(job.job for job in self.source.jobs()), "job"),
                fix="`shoal jobs --all` lists the jobs.",
            )
        return job

    def member(self, name: str, member_id: str) -> MemberView:
        """A member of a job. Raises UnknownJob, UnknownMember, NotLeader."""
        self._require_ready()
        member = self.source.member(name, member_id)
        if member is None:
            job = self.job(name)
            raise UnknownMember(
                f"job {name} has no member {member_id}",
                seen=member_id,
                expected=_one_of(sorted(member.member_id for member in job.members), "member"),
                fix=f"The job is lost: {job.reason}."
                if job.phase == "lost"
                else f"`shoal status --job {name}` lists the members.",
            )
        return member

    def generation(self, name: str, number: int) -> GenerationView:
        """A decided generation. Raises UnknownJob, NotLeader, and UnknownGeneration if it is not
        among the newest 100."""
        found = {record.generation: record for record in self.job(name).generations}
        if number not in found:
            kept = f"{min(found)} to {max(found)}" if found else "none was decided yet"
            raise UnknownGeneration(
                f"job {name} has no decided generation {number}",
                seen=str(number),
                expected=kept,
                fix=f"`shoal status --job {name} --json` lists the newest.",
            )
        return found[number]

    def summary(self, job: JobView) -> JobSummary:
        """Summary of a job."""
        samples, loss = self.source.samples(job.job), self.board.last_loss(job.job)
        return JobSummary(
            job=job.job,
            phase=job.phase,
            state=job.state,
            shown_state=_shown_state(job),
            reason=job.reason,
            since_unix_s=job.since_unix_s,
            generation=job.generation,
            num_members=len(job.members),
            num_training=sum(member.state == "training" for member in job.members),
            step=self._job_step(job),
            begun_unix_s=job.life.begun_unix_s,
            ended_unix_s=job.life.ended_unix_s,
            num_restarts=job.life.num_restarts,
            loss=job.life.loss if loss is None else loss,
            num_samples=job.life.num_samples if samples is None else samples.completed,
            goodput=self._goodput(job),
            last_ending=self.board.last_removal_reason(job.job)
            if job.state == "interrupted"
            else "",
        )

    def _course(self, job: JobView, step: int) -> CourseView:
        board, samples = self.board, self.source.samples(job.job)
        num_steps = board.highest(job.job, "num_steps") if job.synchronous else None
        progress = _progress(step, num_steps, samples)
        return CourseView(
            num_steps=num_steps,
            progress=progress,
            eta_s=None if job.state in OVER else self._eta_s(job, progress, num_steps),
            checkpoint_step=board.highest(job.job, "checkpoint_step"),
            checkpoint_unix_s=board.checkpoint_unix_s(job.job),
            checkpoint_bytes=board.checkpoint_bytes(job.job),
            writes_checkpoints=board.writes_checkpoints(job.job),
            snapshot_unix_s=board.snapshot_unix_s(job.job),
            logged=board.logged(job.job).newest_values(),
        )

    def _eta_s(self, job: JobView, progress: float | None, num_steps: int | None) -> float | None:
        if not progress:
            return None
        if num_steps is None:
            return (time.time() - job.life.begun_unix_s) * (1 - progress) / progress
        known = self.board.history(job.job)
        pace = known[1].steps_per_s() if known is not None else None
        return (1 - progress) * num_steps / pace if pace else None

    def _goodput(self, job: JobView) -> float | None:
        life = job.life
        wall_s = (life.ended_unix_s or time.time()) - life.begun_unix_s
        if not life.begun_unix_s or wall_s <= 0:
            return None
        unproductive_s = life.idle_s + self.board.paused_s(job.job)
        return min(1.0, max(0.0, 1.0 - unproductive_s / wall_s))

    def _job_step(self, job: JobView) -> int:
        """Steps of the job: the highest of a synchronous job, else the sum over members."""
        if job.synchronous:
            steps = [self.step(job, member) for member in job.members]
            return max(self.board.highest_step(job.job), *steps, job.life.step)
        # Steps since a member's last report are known from its heartbeats.
        since = [self.step(job, m) - self._reported_step(job, m) for m in job.members]
        return max(self.board.total_steps(job.job) + sum(since), job.life.step)

    def _reported_step(self, job: JobView, member: MemberView) -> int:
        health = self.board.health(job.job, member.member_id, member.public_id)
        return (health.step or 0) if health else 0

    def step(self, job: JobView, member: MemberView) -> int:
        """The member's newest step, from heartbeat or health report."""
        return max(member.step, self._reported_step(job, member))

    def detail(self, job: JobView) -> JobDetail:
        """All details of a job."""
        members = sorted(job.members, key=lambda m: (m.rank is None, m.rank or 0, m.member_id))
        summary = self.summary(job)
        return JobDetail(
            summary=summary,
            min_members=job.min_members,
            max_members=job.max_members,
            desired_members=job.desired_members,
            synchronous=job.synchronous,
            fields=dict(job.fields),
            members=tuple(self.member_detail(job.job, member) for member in members),
            generations=job.generations,
            samples=self.source.samples(job.job),
            course=self._course(job, summary.step),
            weights=tuple(self.source.weights(job.job)),
            run=self.board.run(job.job),
            hyperparameters=hyperparameters(job.fields),
        )

    def member_detail(self, job: str, member: MemberView) -> MemberDetail:
        """The member with its last health report."""
        key = (job, member.member_id, member.public_id)
        return MemberDetail(
            member=member,
            health=self.board.health(*key),
            losses=tuple(self.board.losses(*key)),
        )

    async def why(self, name: str, member_id: str) -> WaitView:
        """Reason for which the member waits. Raises UnknownJob, UnknownMember, NotLeader, and
        InternalError if records of the job's shards do not parse."""
        job, member = self.job(name), self.member(name, member_id)
        lost = await self._lost_shards(name)
        health = self.board.health(name, member_id, member.public_id)
        return WaitView(
            job=name,
            member_id=member_id,
            state=member.state,
            waiting_for=member.waiting_for,
            waiting_since_unix_s=member.waiting_since_unix_s,
            waiting_s=max(0.0, time.time() - member.waiting_since_unix_s),
            phase=job.phase,
            shown_state=_shown_state(job),
            reason=job.reason,
            generation=job.generation,
            last_error=(health.last_error if health else None) or "",
            lost_shards=lost,
        )

    async def _lost_shards(self, name: str) -> tuple[str, ...]:
        try:
            shards = await self.source.shards(name)
        except Unavailable as error:
            # What the member waits for is known without etcd.
            return (f"it is unknown if shards are lost: {error}",)
        return shards.lost_in_words if shards is not None else ()

    def report(self, name: str, member_id: str, report: HealthReport) -> None:
        """Keep a health report. Raises UnknownJob, UnknownMember, NotLeader, Fenced."""
        # Hundreds of reports come each second: only the member itself is looked up.
        self._require_ready()
        known = self.source.process(name, member_id) or self.member(name, member_id).public_id
        process = public_id(report.incarnation)
        if known != process:
            raise Fenced(
                f"{member_id} is another process by now",
                seen=f"process {process}",
                expected=f"process {known}",
                fix="Join the job again: this process was declared lost or replaced.",
                details={"generation": str(self.job(name).generation)},
            )
        self.board.report(name, member_id, report.view(time.time()))

    def history(self, name: str, last_s: float = 0.0) -> HistoryView:
        """The job's figures over time: of the newest `last_s` seconds, or of its whole life if that
        is 0. Raises UnknownJob, NotLeader."""
        self.job(name)
        known = self.board.history(name)
        series = known[1] if known is not None else Series()
        return HistoryView(
            series=series.view(last_s),
            changes=tuple(self.board.changes(name)),
            logged=self.board.logged(name).view(series.step_before(last_s)),
        )

    def events(self, name: str, after: int, limit: int, *, details: bool = True) -> EventsView:
        """Events with ids above `after`. Raises UnknownJob, NotLeader."""
        self.job(name)
        events = tuple(self.board.events(name, after=after, limit=limit, details=details))
        return EventsView(events=events, next_after=events[-1].id if events else after)


def _shown_state(job: JobView) -> str:
    return SHOWN_PHASES.get(job.phase, job.phase) if job.state == "running" else job.state


def _progress(step: int, num_steps: int | None, samples: SamplesView | None) -> float | None:
    if num_steps:
        return min(1.0, step / num_steps)
    if samples is None or not samples.dataset_size * samples.num_epochs:
        return None
    return samples.completed / (samples.dataset_size * samples.num_epochs)


def _one_of(names: list[str], noun: str) -> str:
    if not names:
        return f"no {noun} exists yet"
    shown = ", ".join(names[:10])
    return f"one of {shown}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")
