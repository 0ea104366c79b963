"""Figures of a job over time, in a bounded number of intervals: if there are too many, each pair is
merged into one of twice the length. So a job of a minute has values for seconds and a job of a
month for hours, in the same space.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal_server.status.history.records import SeriesView

MAX_POINTS = 180
MAX_RANKS = 8
FIRST_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Latest reports of a job's members, at one moment."""

    generation: int
    step: int
    losses: Sequence[float] = ()
    samples_per_s: Sequence[float] = ()
    step_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds that a step takes, by rank."""
    staleness: Sequence[float] = ()


@dataclass(kw_only=True)
class _Mean:
    """Weighted mean of the added values; None if there are none."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float | None, weight: float = 1.0) -> None:
        if value is not None and math.isfinite(value):
            self.total += value * weight
            self.weight += weight

    def join(self, other: "_Mean") -> None:
        self.total += other.total
        self.weight += other.weight

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None


@dataclass(kw_only=True)
class _Point:
    """Values of one interval."""

    number: int
    """Index of the interval, counted from Unix time 0."""
    generation: int = 0
    step: int = 0
    loss: _Mean = field(default_factory=_Mean)
    samples_per_s: _Mean = field(default_factory=_Mean)
    step_s: _Mean = field(default_factory=_Mean)
    slowest_step_s: float | None = None
    staleness: _Mean = field(default_factory=_Mean)
    by_rank: list[_Mean] = field(default_factory=list)

    def add(self, reading: Reading) -> None:
        self.generation = max(self.generation, reading.generation)
        self.step = max(self.step, reading.step)
        self.loss.add(_mean(reading.losses))
        self.samples_per_s.add(sum(reading.samples_per_s) if reading.samples_per_s else None)
        self.staleness.add(_mean(reading.staleness))
        times = [each for each in reading.step_s.values() if math.isfinite(each)]
        if times:
            self.step_s.add(median(times))
            self._slowest(max(times))
        ranks = [rank for rank in reading.step_s if rank < MAX_RANKS]
        self._grow(1 + max(ranks, default=-1))
        for rank in ranks:
            self.by_rank[rank].add(reading.step_s[rank])

    def join(self, other: "_Point") -> None:
        self.generation = max(self.generation, other.generation)
        self.step = max(self.step, other.step)
        for name in ("loss", "samples_per_s", "step_s", "staleness"):
            getattr(self, name).join(getattr(other, name))
        if other.slowest_step_s is not None:
            self._slowest(other.slowest_step_s)
        self._grow(len(other.by_rank))
        for mine, its in zip(self.by_rank, other.by_rank, strict=False):
            mine.join(its)

    def _grow(self, num_ranks: int) -> None:
        self.by_rank += [_Mean() for _ in range(num_ranks - len(self.by_rank))]

    def _slowest(self, step_s: float) -> None:
        self.slowest_step_s = max(step_s, self.slowest_step_s or 0.0)


class Series:
    """The figures of one job."""

    def __init__(self) -> None:
        self._interval_s = FIRST_INTERVAL_S
        self._points: list[_Point] = []

    def add(self, reading: Reading, unix_s: float) -> None:
        """Add a reading to the current interval."""
        number = int(unix_s // self._interval_s)
        if self._points and number < self._points[-1].number:
            number = self._points[-1].number  # the clock was set back
        if not self._points or self._points[-1].number != number:
            self._points.append(_Point(number=number))
        self._points[-1].add(reading)
        self._fit()

    def view(self) -> SeriesView:
        """View of all intervals that have values."""
        points = self._points
        num_ranks = max((len(each.by_rank) for each in points), default=0)
        return SeriesView(
            interval_s=self._interval_s,
            unix_s=tuple(each.number * self._interval_s for each in points),
            generation=tuple(each.generation for each in points),
            step=tuple(each.step for each in points),
            loss=_rounded(each.loss.value for each in points),
            samples_per_s=_rounded(each.samples_per_s.value for each in points),
            step_s=_rounded(each.step_s.value for each in points),
            slowest_step_s=_rounded(each.slowest_step_s for each in points),
            staleness=_rounded(each.staleness.value for each in points),
            step_s_by_rank=tuple(
                _rounded(
                    each.by_rank[rank].value if rank < len(each.by_rank) else None
                    for each in points
                )
                for rank in range(num_ranks)
            ),
        )

    def steps_per_s(self) -> float | None:
        """Steps per second, pauses included, over the newest eighth of the intervals, at least
        three. None if there are fewer."""
        points = self._points
        if len(points) < 3:
            return None
        first = points[-max(3, len(points) // 8)]
        seconds = (points[-1].number - first.number) * self._interval_s
        return (points[-1].step - first.step) / seconds if seconds > 0 else None

    def restore(self, view: SeriesView) -> None:
        """Continue a stored series. Readings added before this call are kept."""
        since, self._points, before_s = self._points, [], self._interval_s
        self._interval_s = max(view.interval_s, FIRST_INTERVAL_S)
        for i, unix_s in enumerate(view.unix_s):
            point = _Point(number=round(unix_s / self._interval_s))
            point.generation, point.step = view.generation[i], view.step[i]
            point.loss.add(view.loss[i])
            point.samples_per_s.add(view.samples_per_s[i])
            point.step_s.add(view.step_s[i])
            point.slowest_step_s = view.slowest_step_s[i]
            point.staleness.add(view.staleness[i])
            for values in view.step_s_by_rank[:MAX_RANKS]:
                mean = _Mean()
                mean.add(values[i])
                point.by_rank.append(mean)
            self._points.append(point)
        for each in since:
            number = int(each.number * before_s // self._interval_s)
            if self._points and number <= self._points[-1].number:
                self._points[-1].join(each)
            else:
                each.number = number
                self._points.append(each)
        self._fit()

    def _fit(self) -> None:
        while len(self._points) > MAX_POINTS:
            self._interval_s *= 2
            joined: list[_Point] = []
            for each in self._points:
                each.number //= 2
                if joined and joined[-1].number == each.number:
                    joined[-1].join(each)
                else:
                    joined.append(each)
            self._points = joined


def _mean(values: Iterable[float]) -> float | None:
    known = [each for each in values if math.isfinite(each)]
    return sum(known) / len(known) if known else None


def _rounded(values: Iterable[float | None]) -> tuple[float | None, ...]:
    """Round to five digits, for a chart."""
    return tuple(None if each is None else float(f"{each:.5g}") for each in values)
