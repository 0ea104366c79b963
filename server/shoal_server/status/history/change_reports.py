"""Changes from one generation to the next, each described in one line. The line is logged when a
member that continues reports its pause, after REPORTED_WITHIN_S, or before the next change."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal_server.core.membership.changes import ChangeSummary
from shoal_server.serving.durations import Durations
from shoal_server.status.history.records import ChangeView

MAX_CHANGES = 100
REPORTED_WITHIN_S = 15.0


@dataclass(frozen=True, kw_only=True)
class ChangeReport:
    """Report of a member that trained before a change and continues after it."""

    member_id: str
    generation: int
    paused_s: float
    steps_lost: int = 0


@dataclass(kw_only=True)
class ChangeTotals:
    """Total cost of all changes of a job."""

    num_lost: int = 0
    steps_lost: int = 0
    recoveries: Durations = field(default_factory=Durations)
    """Seconds from the last step before each change to the first step after it, beyond the usual
    time of a step: of the member that reports first."""


class ChangeReports:
    """The newest changes of one job. All methods but `restore` return the changes to log now, in
    order."""

    def __init__(self) -> None:
        self.changes: deque[ChangeView] = deque(maxlen=MAX_CHANGES)
        self._awaited: tuple[ChangeSummary, ChangeView] | None = None
        """Newest change; None once it is logged."""
        self._stayed: frozenset[str] = frozenset()
        self.totals = ChangeTotals()
        self.extra_s = 0.0
        """Reported pauses minus the time in which no generation ran, in seconds."""

    def add_generation(self, story: ChangeSummary, unix_s: float) -> Sequence[ChangeView]:
        """Add the change to a generation that has begun to run."""
        ended = self.end()
        change = _change(story, unix_s)
        self.totals.num_lost += len(story.lost)
        self.totals.steps_lost += story.steps_lost
        self.changes.append(change)
        self._stayed = frozenset(story.stayed)
        self._awaited = story, change
        return [*ended, *([] if story.synchronous and story.stayed else self.end())]

    def paused(self, pause: ChangeReport) -> Sequence[ChangeView]:
        """Add a member's report of its pause. The longest pause counts."""
        known = self.changes[-1] if self.changes else None
        if known is None or known.generation != pause.generation:
            return []
        if pause.member_id not in self._stayed:
            return []
        before_s = known.paused_s or 0.0
        paused_s = max(before_s, pause.paused_s)
        steps_lost = max(known.steps_lost, pause.steps_lost)
        if (known.paused_s, known.steps_lost) == (paused_s, steps_lost):
            return []
        if known.paused_s is None:
            self.totals.recoveries.observe(pause.paused_s)
        self.totals.steps_lost += steps_lost - known.steps_lost
        self.extra_s += max(paused_s - known.down_s, 0.0) - max(before_s - known.down_s, 0.0)
        change = replace(known, paused_s=paused_s, steps_lost=steps_lost)
        self.changes[-1] = change = replace(change, line=_line(change, self._stayed))
        if self._awaited is None:
            return []
        self._awaited = self._awaited[0], change
        return self.end()

    def due_changes(self, now_unix_s: float) -> Sequence[ChangeView]:
        """Changes to log even without a member's report."""
        if self._awaited is None or now_unix_s < self._awaited[1].unix_s + REPORTED_WITHIN_S:
            return []
        return self.end()

    def end(self) -> Sequence[ChangeView]:
        """Stop waiting for reports on the latest change."""
        awaited, self._awaited = self._awaited, None
        return [] if awaited is None else [awaited[1]]

    def restore(self, changes: Sequence[ChangeView], extra_s: float) -> None:
        """Add older changes, which an earlier leader stored."""
        known = {each.generation for each in self.changes}
        older = [each for each in changes if each.generation not in known]
        self.changes = deque([*older, *self.changes], maxlen=MAX_CHANGES)
        self.extra_s += extra_s


def _change(story: ChangeSummary, unix_s: float) -> ChangeView:
    change = ChangeView(
        generation=story.generation,
        unix_s=unix_s,
        cause=story.cause,
        line="",
        num_members=len(story.stayed) + len(story.joined),
        lost=tuple(each.member_id for each in story.lost),
        left=tuple(each.member_id for each in story.left),
        joined=story.joined,
        down_s=story.down_s,
        steps_lost=story.steps_lost,
    )
    return replace(change, line=_line(change, story.stayed if story.synchronous else ()))


def _line(change: ChangeView, stayed: Sequence[str] | frozenset[str]) -> str:
    """Describe a change: "generation 4: lost vm-2 (SIGKILL); 3 go on; paused 0.06 s; 0 steps
    lost"."""
    parts = [f"generation {change.generation}: {change.cause}"]
    if change.paused_s is not None:
        parts.append(f"paused {seconds(change.paused_s)}")
    elif change.down_s:
        parts.append(f"nobody trained for {seconds(change.down_s)}")
    if stayed or change.steps_lost:
        parts.append(f"{change.steps_lost} step{'' if change.steps_lost == 1 else 's'} lost")
    return "; ".join(parts)


def seconds(value: float) -> str:
    """Format a duration: 0.06 s, 2.3 s, 54 s."""
    if value < 0.005:
        return "0 s"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
