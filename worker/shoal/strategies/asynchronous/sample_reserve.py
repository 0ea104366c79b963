"""Reserve of samples that an asynchronous member leases ahead.

Pure: ranges and times are arguments. While no coordinator answers, a member trains on its reserve.
A member refills the reserve only below three quarters, so that it holds few ranges.
"""

from collections import deque
from collections.abc import Iterable
from math import exp

from shoal_client.progress.ranges import SampleRange, joined, size_of, subtract_ranges

AHEAD_S = 900.0
"""Time for which the reserve is to last if no coordinator, or no etcd, answers."""
REFILL_BELOW = 0.75
PACE_WINDOW_S = 30.0
MAX_LEASE_SAMPLES = 1 << 20
MAX_RANGES = 64
"""Limit of ranges in the reserve. Coordinators refuse a member with 128 held ranges or more."""


class Pace:
    """Average pace of training, with weights that decay over `PACE_WINDOW_S`; waits do not
    count.
    """

    def __init__(self) -> None:
        self._num_samples = 0.0
        self._busy_s = 0.0

    def record_trained(self, num_samples: int, took_s: float) -> None:
        kept = exp(-took_s / PACE_WINDOW_S)
        self._num_samples = self._num_samples * kept + num_samples
        self._busy_s = self._busy_s * kept + took_s

    @property
    def samples_per_s(self) -> float:
        """The pace; 0 before the first batch."""
        return self._num_samples / self._busy_s if self._busy_s > 0.0 else 0.0


class SampleReserve:
    """Ranges that are leased and not begun, in order."""

    def __init__(self, step_samples: int, num_samples: int, *, round_samples: int = 0) -> None:
        """`num_samples`: samples of the job. `round_samples`: samples whose pushes are acknowledged
        together."""
        self.step_samples = step_samples
        self._round_samples = max(round_samples, step_samples)
        self.pace = Pace()
        self._num_samples = num_samples
        self._ready: deque[SampleRange] = deque()
        self._share = self._least

    @property
    def num_ready(self) -> int:
        """Number of samples in the reserve."""
        return size_of(self._ready)

    @property
    def begins_per_s(self) -> int:
        """Upper bound of the samples begun in a second, from the present pace."""
        return int(2 * self.pace.samples_per_s) + self.step_samples

    @property
    def _least(self) -> int:
        return 2 * self._round_samples

    @property
    def wanted(self) -> int:
        """Number of samples to lease ahead, for `AHEAD_S`, in whole steps; at least two rounds."""
        wanted = int(self.pace.samples_per_s * AHEAD_S)
        return max(min(wanted - wanted % self.step_samples, self._num_samples), self._least)

    @property
    def lacking(self) -> int:
        """Number of samples to request, in whole steps; 0 if the reserve has enough."""
        full, ready = min(self.wanted, self._share), self.num_ready
        if len(self._ready) >= MAX_RANGES or (ready > 0 and ready >= REFILL_BELOW * full):
            return 0
        lacking = min(full - ready, MAX_LEASE_SAMPLES)
        return max(lacking - lacking % self.step_samples, self.step_samples)

    def take(self, num_samples: int) -> SampleRange | None:
        """Remove and return the next samples, at most `num_samples`; None if there are none."""
        if not self._ready:
            return None
        first = self._ready.popleft()
        stop = min(first.stop, first.start + num_samples)
        if stop < first.stop:
            self._ready.appendleft(SampleRange(first.epoch, stop, first.stop))
        return SampleRange(first.epoch, first.start, stop)

    def add(self, span: SampleRange) -> None:
        """Add a newly leased range."""
        self._ready = deque(joined([*self._ready, span]))

    def remove(self, ranges: Iterable[SampleRange]) -> None:
        """Remove ranges that this member no longer holds."""
        self._ready = deque(subtract_ranges(self._ready, ranges))

    def beyond_share(self, share: int, num_held: int) -> list[SampleRange]:
        """Remove and return the newest samples that are to be given back.

        `share`: number of samples that this member may hold; 0: unknown, nothing is removed.
        `num_held`: number that it holds, including those that it has begun.
        """
        self._share = share or self._least
        surplus = min(num_held - self._share, self.num_ready)
        return self._taken_from_the_end(surplus - surplus % self.step_samples) if share else []

    def take_all(self) -> list[SampleRange]:
        """Remove and return all ranges."""
        ranges, self._ready = list(self._ready), deque()
        return ranges

    def _taken_from_the_end(self, num_samples: int) -> list[SampleRange]:
        ranges: list[SampleRange] = []
        while num_samples > 0:
            last = self._ready.pop()
            start = max(last.start, last.stop - num_samples)
            if last.start < start:
                self._ready.append(SampleRange(last.epoch, last.start, start))
            ranges.append(SampleRange(last.epoch, start, last.stop))
            num_samples -= last.stop - start
        return ranges
