"""Figures of a job over time, in a bounded number of intervals: a second each for the last minute,
longer ones before that."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shoal_server.status.history.records import SeriesView
from shoal_server.status.history.thinned import ThinnedCurve

MAX_RANKS = 8
FIRST_INTERVAL_S = 1.0
AHEAD = 60
"""Intervals by which a point may be ahead of the clock."""
MAX_POINTS_AHEAD = 8
"""Maximum number of points further ahead that are dropped. A few such points show that the clock
was wrong for a moment: if they stayed, all readings up to their time would be added to the newest
of them. If there are more, the clock may be wrong now, and they stay."""


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


@dataclass(kw_only=True, slots=True)
class _Mean:
    """Weighted mean of the added values."""

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


@dataclass(kw_only=True, slots=True)
class _Point:
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
            self._add_slowest(max(times))
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
            self._add_slowest(other.slowest_step_s)
        self._grow(len(other.by_rank))
        for mine, its in zip(self.by_rank, other.by_rank, strict=False):
            mine.join(its)

    def _grow(self, num_ranks: int) -> None:
        self.by_rank += [_Mean() for _ in range(num_ranks - len(self.by_rank))]

    def _add_slowest(self, step_s: float) -> None:
        self.slowest_step_s = max(step_s, self.slowest_step_s or 0.0)


class Series:
    """The figures of one job."""

    def __init__(self) -> None:
        self._curve = _new_curve()

    def add(self, reading: Reading, unix_s: float) -> None:
        """Add a reading to the current interval."""
        position = int(unix_s // FIRST_INTERVAL_S)
        self._curve.drop_few_after(position + AHEAD, MAX_POINTS_AHEAD)
        self._curve.point_at(position).add(reading)

    def view(self, last_s: float = 0.0) -> SeriesView:
        """View of all intervals that have values; or, in shorter intervals, of the newest `last_s`
        seconds."""
        level, points = self._curve.view(self._start_of(last_s))
        interval_s = FIRST_INTERVAL_S * 2**level
        num_ranks = max((len(each.by_rank) for each in points), default=0)
        return SeriesView(
            interval_s=interval_s,
            unix_s=tuple(each.number * interval_s for each in points),
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

    def _start_of(self, last_s: float) -> int | None:
        if not last_s:
            return None
        return self._curve.end - math.ceil(last_s / FIRST_INTERVAL_S)

    def step_before(self, last_s: float) -> int:
        """Step that was reached before the newest `last_s` seconds; 0 if none, or if `last_s` is
        0."""
        start = self._start_of(last_s)
        steps = [
            point.step
            for level, point in self._curve.points()
            if start is not None and (point.number + 1) << level <= start
        ]
        return max(steps, default=0)

    def steps_per_s(self) -> float | None:
        """Recent pace of steps, over the newest eighth of the job's life. None if too little is
        known."""
        reached = [((p.number + 1) << level, p.step) for level, p in self._curve.points()]
        if len(reached) < 3:
            return None
        end, step = reached[-1]
        since = min(reached[-3][0], end - (end - reached[0][0]) // 8)
        before = (each for each in reached if each[0] <= since)
        start, step_then = max(before, default=reached[0])
        return (step - step_then) / ((end - start) * FIRST_INTERVAL_S) if end > start else None

    def restore(self, view: SeriesView) -> None:
        """Continue a stored series. Readings added before this call are kept."""
        since, self._curve = self._curve, _new_curve()
        level = max(0, math.ceil(math.log2(max(view.interval_s, 1e-9) / FIRST_INTERVAL_S)))
        interval_s = FIRST_INTERVAL_S * 2**level
        for i, unix_s in enumerate(view.unix_s):
            point = _Point(number=int(unix_s // interval_s))
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
            self._curve.add(level, point)
        for own, point in since.points():
            self._curve.add(own, point)


def _new_curve() -> ThinnedCurve[_Point]:
    return ThinnedCurve(lambda number: _Point(number=number))


def _mean(values: Iterable[float]) -> float | None:
    known = [each for each in values if math.isfinite(each)]
    return sum(known) / len(known) if known else None


def _rounded(values: Iterable[float | None]) -> tuple[float | None, ...]:
    return tuple(None if each is None else float(f"{each:.5g}") for each in values)
