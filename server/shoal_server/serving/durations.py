"""Durations as a histogram: the data of Prometheus' histograms."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

BOUNDS_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
MAX_SERIES = 512


class Durations:
    """Histograms by labels, for one event loop.

    Beyond MAX_SERIES combinations of labels, durations are counted in one histogram whose labels
    are all "other".
    """

    def __init__(self, labels: Sequence[str] = ()) -> None:
        self.labels = tuple(labels)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums_s: dict[tuple[str, ...], float] = {}
        if not labels:
            self._row(())

    def observe(self, seconds: float, *labels: str) -> None:
        """Count a duration. `labels`: the value of each label, in order."""
        assert len(labels) == len(self.labels), labels
        key = labels
        if key not in self._counts and len(self._counts) >= MAX_SERIES:
            key = ("other",) * len(self.labels)
        self._row(key)[bisect_left(BOUNDS_S, seconds)] += 1
        self._sums_s[key] += seconds

    def _row(self, key: tuple[str, ...]) -> list[int]:
        if key not in self._counts:
            self._counts[key] = [0] * (len(BOUNDS_S) + 1)
            self._sums_s[key] = 0.0
        return self._counts[key]

    def series(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, float]], float]]:
        """Yield for each set of labels the number of durations up to each bound, and their sum in
        seconds."""
        for key, counts in sorted(self._counts.items()):
            total, buckets = 0, []
            for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            yield key, buckets, self._sums_s[key]
