"""Ranges of samples, by their positions in an epoch's order."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SampleRange:
    """Positions [start, stop) of one epoch's permutation."""

    epoch: int
    start: int
    stop: int


def size_of(ranges: Iterable[SampleRange]) -> int:
    """Number of samples in the ranges."""
    return sum(r.stop - r.start for r in ranges)


def joined(ranges: Iterable[SampleRange]) -> list[SampleRange]:
    """The same samples in as few ranges as possible."""
    found: list[SampleRange] = []
    for r in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and last.epoch == r.epoch and r.start <= last.stop:
            found[-1] = SampleRange(r.epoch, last.start, max(last.stop, r.stop))
        else:
            found.append(r)
    return found


def subtract_ranges(
    ranges: Iterable[SampleRange], taken: Iterable[SampleRange]
) -> list[SampleRange]:
    """Ranges without the parts in `taken`."""
    left = list(ranges)
    for t in taken:
        parts = [(r, max(r.start, t.start), min(r.stop, t.stop)) for r in left]
        left = []
        for r, start, stop in parts:
            if r.epoch != t.epoch or start >= stop:
                left.append(r)
                continue
            rest = (SampleRange(r.epoch, r.start, start), SampleRange(r.epoch, stop, r.stop))
            left += [part for part in rest if part.start < part.stop]
    return left
