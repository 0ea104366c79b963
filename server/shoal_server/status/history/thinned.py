"""Curves whose newest points are dense and whose older ones are thinner, in bounded memory.

The intervals of a level are twice as long as those of the level before. The oldest point of a full
level moves to the next level, where it joins the other half of its interval.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, Protocol, Self, TypeVar

LEVEL_POINTS = 64
"""Number of points of a level. The coarsest level may have twice as many."""
MAX_POINTS = 4 * LEVEL_POINTS


class CurvePoint(Protocol):
    """Values of one interval."""

    number: int
    """Index of the interval within its level, counted from position 0."""

    def join(self, other: Self, /) -> None:
        """Add the values of another point of the same interval."""


P = TypeVar("P", bound=CurvePoint)


class ThinnedCurve(Generic[P]):
    """Points of one curve. A position is the index of an interval of level 0."""

    def __init__(self, new_point: Callable[[int], P]) -> None:
        """`new_point`: makes a point without values, given its number."""
        self._new_point = new_point
        self._levels: list[deque[P]] = [deque()]

    def point_at(self, position: int) -> P:
        """The point for values at a position; the newest point, if the position is before it."""
        newest = self._levels[0]
        if newest and position <= newest[-1].number:
            return newest[-1]
        point = self._new_point(position)
        newest.append(point)
        self._thin(0)
        return point

    def add(self, level: int, point: P) -> None:
        """Add a point of another curve, no older than the points of the level."""
        while len(self._levels) <= level:
            self._levels.append(deque())
        points = self._levels[level]
        if points and point.number <= points[-1].number:
            points[-1].join(point)
        else:
            points.append(point)
        self._thin(level)

    def _thin(self, level: int) -> None:
        while level < len(self._levels):
            points = self._levels[level]
            is_last = not any(self._levels[level + 1 :])
            if len(points) <= LEVEL_POINTS * (2 if is_last else 1):
                return
            if level + 1 == len(self._levels):
                self._levels.append(deque())
            coarser = self._levels[level + 1]
            while len(points) > LEVEL_POINTS:
                oldest = points.popleft()
                oldest.number //= 2
                if coarser and coarser[-1].number == oldest.number:
                    coarser[-1].join(oldest)
                else:
                    coarser.append(oldest)
            level += 1

    def drop_few_after(self, position: int, most: int) -> None:
        """Drop the points that begin after the position, unless there are more than `most`."""
        levels_of_points = list(islice(self._after(position), most + 1))
        if len(levels_of_points) <= most:
            for points in levels_of_points:
                points.pop()

    def _after(self, position: int) -> Iterator[deque[P]]:
        """Yield the level of each point that begins after the position."""
        for level, points in self._filled():
            for point in reversed(points):
                if point.number << level <= position:
                    break
                yield points

    def points(self) -> Iterator[tuple[int, P]]:
        """Yield all points with their levels, the oldest first."""
        for level in reversed(range(len(self._levels))):
            yield from ((level, point) for point in self._levels[level])

    @property
    def end(self) -> int:
        """The position after the newest point; 0 without points."""
        return max((_end(level, points[-1]) for level, points in self._filled()), default=0)

    def _filled(self) -> Iterable[tuple[int, deque[P]]]:
        return ((level, points) for level, points in enumerate(self._levels) if points)

    def view(self, start: int | None = None) -> tuple[int, list[P]]:
        """Return a level, and the points that end after `start` (None: all), joined to intervals of
        that level. It is the coarsest level with such points, or a coarser one if these exceed
        MAX_POINTS."""
        level = 0
        for number, points in self._filled():
            if start is None or _end(number, points[-1]) > start:
                level = number
        while True:
            joined = self._joined(level, start)
            if len(joined) <= MAX_POINTS:
                return level, joined
            level += 1

    def _joined(self, level: int, start: int | None) -> list[P]:
        joined: list[P] = []
        for own, point in self.points():
            if own > level or (start is not None and _end(own, point) <= start):
                continue
            number = point.number >> (level - own)
            if not joined or joined[-1].number < number:
                joined.append(self._new_point(number))
            joined[-1].join(point)
        return joined


def _end(level: int, point: CurvePoint) -> int:
    return (point.number + 1) << level
