"""Queries over a coordinator's state and its board, shared by the API, the metrics and the page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal_proto.errors import (
    Fenced,
    NotLeader,
    Unavailable,
    UnknownGeneration,
    UnknownJob,
    UnknownMember,
)
from shoal_proto.incarnation import public_id
from shoal_proto.short_lists import short_list
from shoal_server.serving.json_view import View
from shoal_server.serving.unix_clock import unix_s
from shoal_server.status.board import StatusBoard
from shoal_server.status.health import HealthReport
from shoal_server.status.history.records import ChangeView, LoggedView, SeriesView
from shoal_server.status.history.series import Series
from shoal_server.status.hyperparameters import hyperparameters
from shoal_server.status.source import StatusSource
from shoal_server.status.views import (
    OVER,
    CourseView,
    EventView,
    GenerationView,
    HealthView,
    JobDetail,
    JobSummary,
    MemberDetail,
    MemberView,
    SamplesView,
)

SPEEDS_KEPT_S = 30.0
SPEEDS_KEPT_STEPS = 3
"""Reports are shown without speeds after SPEEDS_KEPT_S and this many of their steps: members report
after steps, so one that waits or hangs never reports a lower speed."""


@dataclass(frozen=True, kw_only=True)
class WaitView(View):
    """Reason for which a member waits."""

    job: str
    member_id: str
    state: str
    waiting_for: str
    waiting_since_unix_s: float
    waiting_s: float
    phase: str
    shown_state: str
    """The job's state as in JobSummary."""
    reason: str
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
    """Queries over a source and a board: `summary` and `detail` add what members reported."""

    def __init__(self, source: StatusSource, board: StatusBoard) -> None:
        self.source = source
        self.board = board

    def jobs(self) -> Sequence[JobDetail]:
        """List all jobs, without their generations. Raises NotLeader unless this coordinator
        leads."""
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

    def job(self, name: str) -> JobDetail:
        """The job of that name. Raises UnknownJob, NotLeader, and Unavailable while the job is read
        from etcd."""
        self._require_ready()
        job = self.source.job(name)
        if job is None:
            raise UnknownJob(
                f"there is no job {name}",
                seen=name,
                expected=_one_of(sorted(job.summary.job for job in self.source.jobs()), "job"),
                fix="A job is made by the first worker that joins it; workers may still start."
                " `shoal jobs --all` lists the jobs.",
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
                expected=_one_of(sorted(each.member.member_id for each in job.members), "member"),
                fix=f"The job is lost: {job.summary.reason}."
                if job.summary.phase == "lost"
                else f"`shoal status --job {name}` lists the members.",
            )
        return member

    async def generations(self, name: str) -> Sequence[GenerationView]:
        """The newest decided generations. Raises UnknownJob, NotLeader, Unavailable, and
        JobQuarantined if the records of a job that is over do not parse."""
        self.job(name)
        return await self.source.generations(name)

    async def generation(self, name: str, number: int) -> GenerationView:
        """A decided generation. Raises what `generations` raises, and UnknownGeneration if it is
        not among the newest."""
        found = {record.generation: record for record in await self.generations(name)}
        if number not in found:
            kept = f"{min(found)} to {max(found)}" if found else "none was decided yet"
            raise UnknownGeneration(
                f"job {name} has no decided generation {number}",
                seen=str(number),
                expected=kept,
                fix=f"`shoal status --job {name} --json` lists the newest.",
            )
        return found[number]

    def summary(self, job: JobDetail) -> JobSummary:
        """Summary of a job, with what its members reported."""
        known, board = job.summary, self.board
        loss = board.last_loss(known.job)
        unproductive_s = known.unproductive_s + board.paused_s(known.job)
        return replace(
            known,
            step=self._job_step(job),
            loss=known.loss if loss is None else loss,
            num_samples=known.num_samples if job.samples is None else job.samples.completed,
            goodput=_goodput(known, unproductive_s),
            unproductive_s=unproductive_s,
            last_ending=board.last_removal_reason(known.job)
            if known.state in ("interrupted", "waiting")
            else "",
            now_unix_s=unix_s(),
        )

    def _job_step(self, job: JobDetail) -> int:
        """Highest step of a member if members step together, else the sum of their steps."""
        name, members = job.summary.job, [each.member for each in job.members]
        if job.synchronous:
            steps = [self.step(name, member) for member in members]
            return max(self.board.highest_step(name), *steps, job.summary.step)
        # Steps since a member's last report are known from its heartbeats.
        since = [self.step(name, m) - self._reported_step(name, m) for m in members]
        return max(self.board.total_steps(name) + sum(since), job.summary.step)

    def _reported_step(self, job: str, member: MemberView) -> int:
        return self.board.reported_step(job, member.member_id, member.public_id)

    def step(self, job: str, member: MemberView) -> int:
        """Newest step of the member, from heartbeat or report."""
        return max(member.step, self._reported_step(job, member))

    def health(self, job: str, member: MemberView) -> HealthView | None:
        """Last health report of the member; without its speeds if it is old."""
        health = self.board.health(job, member.member_id, member.public_id)
        if health is None:
            return None
        kept_s = SPEEDS_KEPT_S + SPEEDS_KEPT_STEPS * (health.step_time_s or 0.0)
        if unix_s() - health.received_unix_s <= kept_s:
            return health
        return replace(
            health,
            step_time_s=None,
            step_parts=None,
            samples_per_s=None,
            staleness_steps=None,
            cpu_cores=None,
            host_received_bytes_per_s=None,
            host_sent_bytes_per_s=None,
        )

    def detail(self, job: JobDetail, members: Sequence[MemberView] | None = None) -> JobDetail:
        """Details of a job, with what its members reported. `members`: those to include, in this
        order; by default all, by rank."""
        if members is None:
            known = (each.member for each in job.members)
            members = sorted(known, key=lambda m: (m.rank is None, m.rank or 0, m.member_id))
        summary, name = self.summary(job), job.summary.job
        return replace(
            job,
            summary=summary,
            members=tuple(self.member_detail(name, member) for member in members),
            course=self._course(job, summary),
            weights=tuple(self.source.weights(name)),
            run=self.board.run_origin(name),
            hyperparameters=hyperparameters(job.fields),
        )

    def _course(self, job: JobDetail, summary: JobSummary) -> CourseView:
        board, name = self.board, summary.job
        num_steps = board.num_steps(name) if job.synchronous else None
        progress = _progress(summary.step, num_steps, job.samples)
        return CourseView(
            num_steps=num_steps,
            progress=progress,
            eta_s=self._eta_s(summary, progress, num_steps),
            checkpoint_step=board.checkpoint_step(name),
            checkpoint_unix_s=board.checkpoint_unix_s(name),
            checkpoint_bytes=board.checkpoint_bytes(name),
            writes_checkpoints=board.writes_checkpoints(name),
            snapshot_unix_s=board.snapshot_unix_s(name),
            logged=board.logged(name).newest_values(),
        )

    def _eta_s(
        self, summary: JobSummary, progress: float | None, num_steps: int | None
    ) -> float | None:
        if not progress or summary.state in OVER:
            return None
        if num_steps is None:
            return (unix_s() - summary.begun_unix_s) * (1 - progress) / progress
        known = self.board.history(summary.job)
        pace = known[1].steps_per_s() if known is not None else None
        return (1 - progress) * num_steps / pace if pace else None

    def member_detail(self, job: str, member: MemberView) -> MemberDetail:
        """The member with its last health report."""
        losses = self.board.losses(job, member.member_id, member.public_id)
        return MemberDetail(member=member, health=self.health(job, member), losses=tuple(losses))

    async def why(self, name: str, member_id: str) -> WaitView:
        """Reason for which the member waits. Raises UnknownJob, UnknownMember, NotLeader, and
        InternalError if records of the job's shards do not parse."""
        job, member = self.job(name).summary, self.member(name, member_id)
        lost = await self._lost_shards(name)
        health = self.health(name, member)
        return WaitView(
            job=name,
            member_id=member_id,
            state=member.state,
            waiting_for=member.waiting_for,
            waiting_since_unix_s=member.waiting_since_unix_s,
            waiting_s=max(0.0, unix_s() - member.waiting_since_unix_s),
            phase=job.phase,
            shown_state=job.shown_state,
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
        # Hundreds of reports come each second.
        self._require_ready()
        known = self.source.process(name, member_id) or self.member(name, member_id).public_id
        process = public_id(report.incarnation)
        if known != process:
            raise Fenced(
                f"{member_id} is another process by now",
                seen=f"process {process}",
                expected=f"process {known}",
                fix="Join the job again: this process was declared lost or replaced.",
                details={"generation": str(self.job(name).summary.generation)},
            )
        self.board.report(name, member_id, report.view(unix_s()))

    def history(self, name: str, last_s: float = 0.0) -> HistoryView:
        """Figures of the job over the newest `last_s` seconds; 0: over its whole life. Raises
        UnknownJob, NotLeader."""
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


def _goodput(job: JobSummary, unproductive_s: float) -> float | None:
    wall_s = (job.ended_unix_s or unix_s()) - job.begun_unix_s
    if not job.begun_unix_s or wall_s <= 0:
        return None
    return min(1.0, max(0.0, 1.0 - unproductive_s / wall_s))


def _progress(step: int, num_steps: int | None, samples: SamplesView | None) -> float | None:
    if num_steps:
        return min(1.0, step / num_steps)
    if samples is None or not samples.dataset_size * samples.num_epochs:
        return None
    return samples.completed / (samples.dataset_size * samples.num_epochs)


def _one_of(names: list[str], noun: str) -> str:
    return f"one of {short_list(names, 10)}" if names else f"an existing {noun}"
