"""Values that scripts log, averaged over a bounded number of intervals of steps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal_proto.health import MAX_LOGGED
from shoal_server.status.history.records import LoggedView
from shoal_server.status.history.thinned import ThinnedCurve


@dataclass(kw_only=True, slots=True)
class _Point:
    number: int
    """Index of the interval, counted from step 0."""
    total: float = 0.0
    count: int = 0

    def join(self, other: "_Point") -> None:
        self.total += other.total
        self.count += other.count


class LoggedSeries:
    """The values of one name."""

    def __init__(self) -> None:
        self.step = -1
        self.value = math.nan
        self._curve: ThinnedCurve[_Point] = ThinnedCurve(lambda number: _Point(number=number))

    def add(self, step: int, value: float) -> None:
        """Add a value. Values of steps up to the newest one are ignored."""
        if step <= self.step:
            return
        self.step, self.value = step, value
        if math.isfinite(value):
            self._curve.point_at(step).join(_Point(number=step, total=value, count=1))

    def view(self, name: str, after_step: int = 0) -> LoggedView:
        """View of the intervals that end after `after_step`; the later that step, the shorter they
        are."""
        level, points = self._curve.view(after_step or None)
        return LoggedView(
            name=name,
            newest_step=self.step,
            newest=self.value,
            interval_steps=1 << level,
            steps=tuple(each.number << level for each in points),
            values=tuple(float(f"{each.total / each.count:.5g}") for each in points),
        )

    @classmethod
    def from_view(cls, view: LoggedView) -> "LoggedSeries":
        """Restore a series from its view."""
        series = cls()
        series.step, series.value = view.newest_step, view.newest
        level = (max(1, view.interval_steps) - 1).bit_length()
        for step, value in zip(view.steps, view.values, strict=True):
            series._curve.add(level, _Point(number=step >> level, total=value, count=1))
        return series


class LoggedValues:
    """Series of the first MAX_LOGGED names that were logged in one job."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoggedSeries] = {}

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """Add a member's report: step and newest value of each name."""
        for name, (step, value) in values.items():
            if name in self._by_name or len(self._by_name) < MAX_LOGGED:
                self._by_name.setdefault(name, LoggedSeries()).add(int(step), value)

    def newest_values(self) -> dict[str, tuple[int, float]]:
        """Newest value of each name, with its step."""
        return {name: (each.step, each.value) for name, each in self._by_name.items()}

    def view(self, after_step: int = 0) -> tuple[LoggedView, ...]:
        """Views of all names, see `LoggedSeries.view`."""
        return tuple(each.view(name, after_step) for name, each in self._by_name.items())

    def restore(self, views: Iterable[LoggedView]) -> None:
        """Continue an earlier leader's series, and keep the newest values added since."""
        since, self._by_name = self._by_name, {v.name: LoggedSeries.from_view(v) for v in views}
        self.add({name: (each.step, each.value) for name, each in since.items()})
