"""Data that the coordinator keeps only to show it: health reports and events, both bounded."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import structlog

from shoal_proto.health import CourseFigures, RunOrigin
from shoal_server.core.membership.changes import ChangeSummary
from shoal_server.serving.unix_clock import unix_s
from shoal_server.status.history.change_reports import ChangeReport, ChangeReports, ChangeTotals
from shoal_server.status.history.logged import LoggedValues
from shoal_server.status.history.records import ChangeView, LoggedView, SeriesView
from shoal_server.status.history.series import Reading, Series
from shoal_server.status.views import EventView, HealthView

log = structlog.get_logger(__name__)

Value = TypeVar("Value")

MAX_EVENTS = 1000
MAX_MEMBERS = 4096
MAX_KEPT_STEPS = 32768
MAX_JOBS = 256
MAX_LOSSES = 60
MAX_REASON_LENGTH = 2000
DETAILS = frozenset(
    {
        *("member_joined", "member_proposed", "member_removed", "boundary_agreed"),
        *("collective_failed", "phase_collect", "phase_prepare", "phase_committed"),
        *("phase_aborted", "phase_running", "shards_copied"),
        *("member_paused", "member_resumed"),
    }
)
"""Kinds of events that are details: other events, such as `generation_changed`, sum them up in one
line, or they come with each evaluation."""


@dataclass(kw_only=True)
class _MemberHealth:
    latest: HealthView
    step: int = 0
    """Newest reported step, which may fall: the next report corrects a wrong one."""
    losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))


@dataclass(kw_only=True)
class _Checkpoints:
    is_followed: bool = False
    step: int = -1
    unix_s: float | None = None
    num_bytes: int | None = None

    def add(self, course: CourseFigures, unix_s: float) -> None:
        step = course.checkpoint_step
        if step is not None and step > self.step:
            # The first report may name an old checkpoint, whose age is not known.
            self.step, self.unix_s = step, unix_s if self.is_followed else None
            self.num_bytes = course.checkpoint_bytes
        self.is_followed = True


@dataclass(kw_only=True)
class _JobBoard:
    events: deque[EventView] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    health: OrderedDict[str, _MemberHealth] = field(default_factory=OrderedDict)
    num_reports: int = 0
    gone_highest_step: int = 0
    gone_total_steps: int = 0
    kept_steps: dict[str, int] = field(default_factory=dict)
    """Steps of processes without a report in `health`, by public id: they reported to an earlier
    leader, or too many members have reported since."""
    last_loss: float | None = None
    event_counts: Counter[str] = field(default_factory=Counter)
    reports: ChangeReports = field(default_factory=ChangeReports)
    series: Series = field(default_factory=Series)
    logged: LoggedValues = field(default_factory=LoggedValues)
    snapshot_unix_s: float | None = None
    checkpoints: _Checkpoints = field(default_factory=_Checkpoints)
    run: RunOrigin | None = None
    last_removal: str = ""
    """Reason of the last removal of a member."""

    def replace(self, member_id: str, health: HealthView) -> _MemberHealth:
        if (before := self.health.pop(member_id, None)) is not None:
            self.settle(before)
        fresh = self.health[member_id] = _MemberHealth(latest=health)
        return fresh

    def settle(self, gone: _MemberHealth) -> None:
        self.gone_highest_step = max(self.gone_highest_step, gone.step)
        self.gone_total_steps += gone.step

    def evict(self) -> None:
        """Drop the report of the member that reported longest ago, but not its steps: it may report
        again."""
        _, oldest = self.health.popitem(last=False)
        self.gone_highest_step = max(self.gone_highest_step, oldest.step)
        self.kept_steps[oldest.latest.public_id] = oldest.step
        if len(self.kept_steps) > MAX_KEPT_STEPS:
            self.gone_total_steps += self.kept_steps.pop(next(iter(self.kept_steps)))

    @property
    def highest_step(self) -> int:
        return max(self.gone_highest_step, *(each.step for each in self.health.values()), 0)

    @property
    def total_steps(self) -> int:
        return self.gone_total_steps + sum(self.steps_by_process.values())

    @property
    def steps_by_process(self) -> Mapping[str, int]:
        own = {each.latest.public_id: each.step for each in self.health.values()}
        return self.kept_steps | own


class StatusBoard:
    """Health and events of jobs: of all live ones, and of ended ones while there are at most
    MAX_JOBS. Belongs to one event loop.

    For each job it keeps the newest MAX_EVENTS events, and the latest report and MAX_LOSSES losses
    of the MAX_MEMBERS members that reported last; of MAX_KEPT_STEPS others the step.
    """

    def __init__(
        self,
        clock: Callable[[], float] = unix_s,
        is_live: Callable[[str], bool] = lambda job: False,
    ) -> None:
        """`is_live`: True for a job that has not ended; its board is never dropped."""
        self._clock = clock
        self._is_live = is_live
        self._jobs: OrderedDict[str, _JobBoard] = OrderedDict()
        self._last_event_id = 0
        self._last_id_before_term = 0

    def event(
        self, job: str, kind: str, reason: str, *, member_id: str = "", generation: int = 0
    ) -> EventView:
        """Record an event. `kind`: as in the log, such as member_joined."""
        # Ids are at least the clock's milliseconds, so that they rise from leader to leader.
        self._last_event_id = max(self._last_event_id + 1, int(self._clock() * 1000))
        event = EventView(
            id=self._last_event_id,
            unix_s=self._clock(),
            kind=kind,
            reason=reason[:MAX_REASON_LENGTH],
            member_id=member_id,
            generation=generation,
            detail=kind in DETAILS,
        )
        board = self._board(job)
        board.events.append(event)
        board.event_counts[kind] += 1
        if kind == "member_removed":
            board.last_removal = event.reason
        return event

    def record_generation(self, job: str, story: ChangeSummary) -> None:
        """Record that a generation runs. `ChangeReports` decides when the change is logged."""
        self._log_changes(job, self._board(job).reports.add_generation(story, self._clock()))

    def log_due_reports(self, job: str) -> None:
        """Log a change that has waited long enough for reports."""
        if (board := self._jobs.get(job)) is not None:
            self._log_changes(job, board.reports.due_changes(self._clock()))

    def _log_changes(self, job: str, changes: Sequence[ChangeView]) -> None:
        for change in changes:
            log.info("generation_changed", job=job, reason=change.line)
            self.event(job, "generation_changed", change.line, generation=change.generation)

    def snapshot_taken(self, job: str, message: str) -> None:
        """Record that a complete snapshot of the job was taken just now."""
        self._board(job).snapshot_unix_s = self._clock()
        self.event(job, "snapshot_taken", message)

    def snapshot_unix_s(self, job: str) -> float | None:
        """Time of this coordinator's newest snapshot; None without one."""
        board = self._jobs.get(job)
        return board.snapshot_unix_s if board else None

    def changes(self, job: str) -> Sequence[ChangeView]:
        """Latest changes of the generation, the newest last; at most 100."""
        board = self._jobs.get(job)
        return tuple(board.reports.changes) if board else ()

    def paused_s(self, job: str) -> float:
        """Seconds in which a generation ran but members did not train."""
        board = self._jobs.get(job)
        return board.reports.extra_s if board else 0.0

    def change_totals(self, job: str) -> ChangeTotals:
        """Cost of membership changes in this coordinator's term, or since the last reset."""
        board = self._jobs.get(job)
        return board.reports.totals if board else ChangeTotals()

    def measured(self, job: str, reading: Reading) -> None:
        """Add a reading to the job's charts."""
        self._board(job).series.add(reading, self._clock())

    def reports(self, job: str) -> Mapping[str, HealthView]:
        """Newest report of each member, including gone ones."""
        board = self._jobs.get(job)
        return {name: each.latest for name, each in board.health.items()} if board else {}

    def restore_history(
        self,
        job: str,
        series: SeriesView,
        changes: Sequence[ChangeView],
        extra_s: float,
        *,
        logged: Sequence[LoggedView] = (),
        run: RunOrigin | None = None,
        last_removal: str = "",
    ) -> None:
        """Continue the history that an earlier leader stored."""
        board = self._board(job)
        board.run = board.run or run
        board.last_removal = board.last_removal or last_removal
        board.logged.restore(logged)
        board.series.restore(series)
        board.reports.restore(changes, extra_s)

    def restore_steps(self, job: str, gone_steps: int, by_process: Mapping[str, int]) -> None:
        """Continue the sum of steps that an earlier leader stored. `gone_steps`: of processes that
        are gone; `by_process`: of the job's members, by public id."""
        board = self._board(job)
        for name, each in list(board.health.items()):
            # Ended since its report: `gone_steps` has its steps.
            if each.latest.public_id not in by_process:
                board.gone_highest_step = max(board.gone_highest_step, each.step)
                del board.health[name]
        board.gone_total_steps = max(board.gone_total_steps, gone_steps)
        reported = {each.latest.public_id for each in board.health.values()}
        board.kept_steps = {p: step for p, step in by_process.items() if p not in reported}

    def history(self, job: str) -> tuple[ChangeReports, Series] | None:
        """Changes and charted series of the job; None if unknown."""
        board = self._jobs.get(job)
        return (board.reports, board.series) if board else None

    def num_steps(self, job: str) -> int | None:
        """Steps of the job in total, by the newest report that has this figure: a job that is
        resumed with other settings may have another number. None without one."""
        return _newest(course.num_steps for course in self._courses(job))

    def checkpoint_step(self, job: str) -> int | None:
        """Step of the newest reported checkpoint; None without one."""
        steps = (course.checkpoint_step for course in self._courses(job))
        return max((step for step in steps if step is not None), default=None)

    def checkpoint_unix_s(self, job: str) -> float | None:
        """Time at which the newest checkpoint was first reported; None without one, or if the first
        report to this coordinator already named it."""
        board = self._jobs.get(job)
        return board.checkpoints.unix_s if board else None

    def checkpoint_bytes(self, job: str) -> int | None:
        """Bytes of the newest reported checkpoint, if any."""
        board = self._jobs.get(job)
        return board.checkpoints.num_bytes if board else None

    def writes_checkpoints(self, job: str) -> bool | None:
        """True if the job writes checkpoints, by the newest report that has this figure; None
        without one."""
        return _newest(course.writes_checkpoints for course in self._courses(job))

    def _courses(self, job: str) -> Iterator[CourseFigures]:
        """Yield the course in each member's latest report, the newest report first."""
        board = self._jobs.get(job)
        for each in reversed(board.health.values()) if board else ():
            if each.latest.course is not None:
                yield each.latest.course

    def run_origin(self, job: str) -> RunOrigin | None:
        """Command line and commit of the job's script, if reported."""
        board = self._jobs.get(job)
        return board.run if board else None

    def logged(self, job: str) -> LoggedValues:
        """Values that the job's script has logged."""
        board = self._jobs.get(job)
        return board.logged if board else LoggedValues()

    def events(
        self, job: str, *, after: int = 0, limit: int = 100, details: bool = True
    ) -> Sequence[EventView]:
        """The oldest `limit` events with an id above `after`, in order. `details`: include events
        that `generation_changed` sums up.

        An `after` above all ids is an earlier leader's whose clock was ahead: all events of this
        term are later.
        """
        if after > self._last_event_id:
            after = self._last_id_before_term
        board = self._jobs.get(job)
        known = board.events if board else ()
        found = [e for e in known if e.id > after and (details or not e.detail)]
        return found[:limit]

    def last_events(self, job: str, limit: int) -> Sequence[EventView]:
        """The newest `limit` events, in order."""
        board = self._jobs.get(job)
        return list(board.events)[-limit:] if board else ()

    def last_removal_reason(self, job: str) -> str:
        """Reason of the last removal of a member; empty if there is none."""
        board = self._jobs.get(job)
        return board.last_removal if board else ""

    def event_counts(self, job: str) -> Mapping[str, int]:
        """Number of events of each kind."""
        board = self._jobs.get(job)
        return dict(board.event_counts) if board else {}

    def report(self, job: str, member_id: str, health: HealthView) -> None:
        """Keep a health report of a member that exists."""
        board = self._board(job)
        known = board.health.get(member_id)
        if known is None or known.latest.public_id != health.public_id:
            known = board.replace(member_id, health)
        known.latest = health
        known.step = known.step if health.step is None else health.step
        board.kept_steps.pop(health.public_id, None)
        board.num_reports += 1
        board.health.move_to_end(member_id)
        if len(board.health) > MAX_MEMBERS:
            board.evict()
        if health.paused_s is not None and health.generation is not None:
            pause = ChangeReport(
                member_id=member_id,
                generation=health.generation,
                paused_s=health.paused_s,
                steps_lost=health.lost_steps or 0,
            )
            self._log_changes(job, board.reports.paused(pause))
        if health.course is not None:
            board.logged.add(health.course.logged)
            board.checkpoints.add(health.course, self._clock())
            board.run = health.course.run or board.run
        if health.loss is not None:
            board.last_loss = health.loss
        if health.loss is not None and health.step is not None:
            while known.losses and known.losses[-1][0] >= health.step:
                known.losses.pop()  # the step was redone, or reported twice
            known.losses.append((health.step, health.loss))

    def reset_reports(self, job: str) -> None:
        """Drop all that members of the job reported, and the reason of the last removal, for the
        next run or term. Events and counts stay. The newest snapshot's time goes too: an earlier
        run's is not restored automatically, and another leader may have taken newer ones."""
        board = self._jobs.get(job)
        if board is not None:
            board.health.clear()
            board.gone_highest_step = board.gone_total_steps = 0
            board.kept_steps.clear()
            board.last_loss = board.snapshot_unix_s = None
            board.reports, board.series, board.logged = ChangeReports(), Series(), LoggedValues()
            board.checkpoints, board.run, board.last_removal = _Checkpoints(), None, ""

    def end_term(self) -> None:
        """Reset the reports of all jobs, since this coordinator no longer leads. The next term
        continues the stored history, which has most of them."""
        self._last_id_before_term = self._last_event_id
        for job in self._jobs:
            self.reset_reports(job)

    def health(self, job: str, member_id: str, process: str) -> HealthView | None:
        """Latest report of the member's process with that public id; None without one."""
        known = self._health(job, member_id, process)
        return known.latest if known else None

    def reported_step(self, job: str, member_id: str, process: str) -> int:
        """Newest step that the member's process with that public id reported; 0 without one."""
        known, board = self._health(job, member_id, process), self._jobs.get(job)
        if known is not None:
            return known.step
        return board.kept_steps.get(process, 0) if board else 0

    def losses(self, job: str, member_id: str, process: str) -> Sequence[tuple[int, float]]:
        """(step, loss) of the last reports of the member's process with that public id."""
        known = self._health(job, member_id, process)
        return tuple(known.losses) if known else ()

    def num_reports(self, job: str) -> int:
        """Number of health reports since this coordinator started."""
        board = self._jobs.get(job)
        return board.num_reports if board else 0

    def highest_step(self, job: str) -> int:
        """Highest step of the job's members, including gone ones."""
        board = self._jobs.get(job)
        return board.highest_step if board else 0

    def steps_to_keep(self, job: str) -> tuple[int, Mapping[str, int]]:
        """Sum of the steps of replaced processes, and the steps of the others by public id."""
        board = self._jobs.get(job)
        return (board.gone_total_steps, board.steps_by_process) if board else (0, {})

    def total_steps(self, job: str) -> int:
        """Sum of steps of all members, including gone ones."""
        board = self._jobs.get(job)
        return board.total_steps if board else 0

    def last_loss(self, job: str) -> float | None:
        """Last reported loss, if any."""
        board = self._jobs.get(job)
        return board.last_loss if board else None

    def _health(self, job: str, member_id: str, process: str) -> _MemberHealth | None:
        board = self._jobs.get(job)
        known = board.health.get(member_id) if board else None
        return known if known and known.latest.public_id == process else None

    def _board(self, job: str) -> _JobBoard:
        board = self._jobs.get(job)
        if board is None:
            self._drop_ended(len(self._jobs) + 1 - MAX_JOBS)
            board = self._jobs[job] = _JobBoard()
        self._jobs.move_to_end(job)
        return board

    def _drop_ended(self, num_surplus: int) -> None:
        """Drop up to `num_surplus` boards of ended jobs, the least recently written ones first."""
        ended = (job for job in tuple(self._jobs) if not self._is_live(job))
        for job in islice(ended, max(num_surplus, 0)):
            del self._jobs[job]


def _newest(values: Iterator[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)
