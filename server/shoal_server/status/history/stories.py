"""The line that tells how a generation followed another, put together from two sides.

The coordinator knows who went and why, and when the generation ran. For how long nobody trained,
those who train on know: from the last step that they committed before to the first one after. They
say it with their health; with the first of them the line is told. Where none of them says anything
within a while, it is told without.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal_server.core.membership.changes import ChangeSummary
from shoal_server.serving.durations import Durations
from shoal_server.status.history.records import ChangeView

MAX_CHANGES = 100
TOLD_WITHIN_S = 15.0


@dataclass(frozen=True, kw_only=True)
class ChangeReport:
    """Report of a member about a change that it has trained through."""

    member_id: str
    generation: int
    paused_s: float
    steps_lost: int = 0


@dataclass(kw_only=True)
class ChangeTotals:
    """Total cost of all changes of a job."""

    num_lost: int = 0
    """Members that went without leave."""
    steps_lost: int = 0
    recoveries: Durations = field(default_factory=Durations)
    """From the last step before a change to the first one after, of each."""


class ChangeReports:
    """The newest changes of one job. What each method returns is to be told now, in this order."""

    def __init__(self) -> None:
        self.changes: deque[ChangeView] = deque(maxlen=MAX_CHANGES)
        self._awaited: tuple[ChangeSummary, ChangeView] | None = None
        """The newest, until it is told."""
        self._stayed: frozenset[str] = frozenset()
        self.totals = ChangeTotals()
        self.extra_s = 0.0
        """Seconds that members did not train because of changes while a generation ran: the pauses
        beyond the times that none did."""

    def runs(self, story: ChangeSummary, unix_s: float) -> Sequence[ChangeView]:
        """A generation has come to run."""
        told = self.end()
        change = _change(story, unix_s)
        self.totals.num_lost += len(story.lost)
        self.totals.steps_lost += story.steps_lost
        self.changes.append(change)
        self._stayed = frozenset(story.stayed)
        self._awaited = story, change
        return [*told, *([] if story.synchronous and story.stayed else self.end())]

    def paused(self, pause: ChangeReport) -> Sequence[ChangeView]:
        """A member says for how long it did not train. The longest of all counts."""
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

    def due(self, now_unix_s: float) -> Sequence[ChangeView]:
        """Changes that are due to be told now, even if some members have not reported."""
        if self._awaited is None or now_unix_s < self._awaited[1].unix_s + TOLD_WITHIN_S:
            return []
        return self.end()

    def end(self) -> Sequence[ChangeView]:
        """Stop waiting for reports on the latest change."""
        awaited, self._awaited = self._awaited, None
        return [] if awaited is None else [awaited[1]]

    def restore(self, changes: Sequence[ChangeView], extra_s: float) -> None:
        """Add older changes, which another leader kept."""
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
    """ "generation 4: lost vm-2 (SIGKILL); 3 go on; paused 0.06 s; 0 steps lost" """
    parts = [f"generation {change.generation}: {change.cause}"]
    if change.paused_s is not None:
        parts.append(f"paused {seconds(change.paused_s)}")
    elif change.down_s:
        parts.append(f"nobody trained for {seconds(change.down_s)}")
    if stayed or change.steps_lost:
        parts.append(f"{change.steps_lost} step{'' if change.steps_lost == 1 else 's'} lost")
    return "; ".join(parts)


def seconds(value: float) -> str:
    """A time as people read it: 0.06 s, 2.3 s, 54 s."""
    if value < 0.005:
        return "0 s"
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
