"""Samples that a member at its own pace holds ahead, to go on while no coordinator answers.

Pure: ranges and times are arguments. A member wants to hold as many samples as it trains on in
`AHEAD_S` seconds at its pace. It asks for more once a quarter of them is used up, so it holds few
ranges. It gives back what exceeds its share according to the coordinator.
"""

from collections import deque
from collections.abc import Iterable
from math import exp

from shoal_client.progress.samples import SampleRange, joined, size_of, without

AHEAD_S = 900.0
"""A coordinator, or etcd under it, may be away for so long before members run out of samples."""
REFILL_BELOW = 0.75
PACE_WINDOW_S = 30.0
MAX_LEASE_SAMPLES = 1 << 20
"""Samples asked for at a time; a coordinator gives no more."""
MAX_RANGES = 64
"""Number of ranges beyond which no more are asked for. Coordinators refuse more than 128."""


class Pace:
    """Samples a second, while there are some to train on: mostly of the last half minute."""

    def __init__(self) -> None:
        self._num_samples = 0.0
        self._busy_s = 0.0

    def trained(self, num_samples: int, took_s: float) -> None:
        kept = exp(-took_s / PACE_WINDOW_S)
        self._num_samples = self._num_samples * kept + num_samples
        self._busy_s = self._busy_s * kept + took_s

    @property
    def samples_per_s(self) -> float:
        """0 while it is not known."""
        return self._num_samples / self._busy_s if self._busy_s > 0.0 else 0.0


class SampleReserve:
    """The ranges that are leased and not begun, in order."""

    def __init__(self, step_samples: int, num_samples: int, *, round_samples: int = 0) -> None:
        """`round_samples`: trained on between two acknowledgements. `num_samples`: of the job."""
        self.step_samples = step_samples
        self._round_samples = max(round_samples, step_samples)
        self.pace = Pace()
        self._num_samples = num_samples
        self._ready: deque[SampleRange] = deque()
        self._share = self._least

    @property
    def num_ready(self) -> int:
        """Samples that are there to begin with."""
        return size_of(self._ready)

    @property
    def begins_per_s(self) -> int:
        """Largest number of samples that are begun in a second, at the present pace."""
        return int(2 * self.pace.samples_per_s) + self.step_samples

    @property
    def _least(self) -> int:
        """Samples trained on now, and as many after them."""
        return 2 * self._round_samples

    @property
    def wanted(self) -> int:
        """Number of samples to hold in all, in whole steps."""
        wanted = int(self.pace.samples_per_s * AHEAD_S)
        return max(min(wanted - wanted % self.step_samples, self._num_samples), self._least)

    @property
    def lacking(self) -> int:
        """Number of samples to ask for, in whole steps; 0 while there are enough."""
        full, ready = min(self.wanted, self._share), self.num_ready
        if len(self._ready) >= MAX_RANGES or (ready > 0 and ready >= REFILL_BELOW * full):
            return 0
        lacking = min(full - ready, MAX_LEASE_SAMPLES)
        return max(lacking - lacking % self.step_samples, self.step_samples)

    def take(self, num_samples: int) -> SampleRange | None:
        """The next samples to train on, at most so many; None: there are none."""
        if not self._ready:
            return None
        first = self._ready.popleft()
        stop = min(first.stop, first.start + num_samples)
        if stop < first.stop:
            self._ready.appendleft(SampleRange(first.epoch, stop, first.stop))
        return SampleRange(first.epoch, first.start, stop)

    def leased(self, span: SampleRange) -> None:
        """More to train on."""
        self._ready = deque(joined([*self._ready, span]))

    def lost(self, ranges: Iterable[SampleRange]) -> None:
        """Remove ranges that this member no longer holds."""
        self._ready = deque(without(self._ready, ranges))

    def beyond_share(self, share: int, num_held: int) -> list[SampleRange]:
        """Remove from the reserve, and return, the newest ranges to give back. `num_held` is what
        it holds in all. `share` is the part of it that leaves the others theirs; 0 if that is not
        known."""
        self._share = share or self._least
        surplus = min(num_held - self._share, self.num_ready)
        return self._taken_from_the_end(surplus - surplus % self.step_samples) if share else []

    def all(self) -> list[SampleRange]:
        """Empty the reserve and return its ranges, for a member that ends."""
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
