"""Values that scripts log, over steps: one a step, averaged in a bounded number of intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal_proto.health import MAX_LOGGED
from shoal_server.status.history.records import LoggedView

MAX_POINTS = 180


@dataclass(kw_only=True)
class _Point:
    number: int
    """Index of the interval, counted from step 0."""
    total: float
    count: int


class LoggedSeries:
    """The values of one name."""

    def __init__(self) -> None:
        self.step = -1
        """Step of the newest value; -1 before the first."""
        self.value = math.nan
        self._interval = 1
        self._points: list[_Point] = []

    def add(self, step: int, value: float) -> None:
        """Add a value. If a step is taken again, its first value counts; values of steps before the
        newest one are ignored."""
        if step <= self.step:
            return
        self.step, self.value = step, value
        if math.isfinite(value):
            self._put(step // self._interval, value, 1)

    def _put(self, number: int, total: float, count: int) -> None:
        if self._points and self._points[-1].number == number:
            self._points[-1].total += total
            self._points[-1].count += count
        else:
            self._points.append(_Point(number=number, total=total, count=count))
        while len(self._points) > MAX_POINTS:
            points, self._points = self._points, []
            self._interval *= 2
            for each in points:
                self._put(each.number // 2, each.total, each.count)

    def view(self, name: str) -> LoggedView:
        return LoggedView(
            name=name,
            newest_step=self.step,
            newest=self.value,
            interval_steps=self._interval,
            steps=tuple(each.number * self._interval for each in self._points),
            values=tuple(float(f"{each.total / each.count:.5g}") for each in self._points),
        )

    @classmethod
    def kept(cls, view: LoggedView) -> "LoggedSeries":
        """Restore a series from its view."""
        series = cls()
        series.step, series.value = view.newest_step, view.newest
        series._interval = max(1, view.interval_steps)
        for step, value in zip(view.steps, view.values, strict=True):
            series._put(step // series._interval, value, 1)
        return series


class LoggedValues:
    """Series of the first 32 names that were logged in one job."""

    def __init__(self) -> None:
        self._by_name: dict[str, LoggedSeries] = {}

    def add(self, values: Mapping[str, Sequence[float]]) -> None:
        """Add a member's report: step and newest value of each name."""
        for name, (step, value) in values.items():
            if name in self._by_name or len(self._by_name) < MAX_LOGGED:
                self._by_name.setdefault(name, LoggedSeries()).add(int(step), value)

    def newest(self) -> dict[str, tuple[int, float]]:
        """Step and value of each name."""
        return {name: (each.step, each.value) for name, each in self._by_name.items()}

    def view(self) -> tuple[LoggedView, ...]:
        return tuple(each.view(name) for name, each in self._by_name.items())

    def restore(self, views: Iterable[LoggedView]) -> None:
        """Continue the series that an earlier leader stored; values added until now are kept."""
        since, self._by_name = self._by_name, {v.name: LoggedSeries.kept(v) for v in views}
        self.add({name: (each.step, each.value) for name, each in since.items()})
