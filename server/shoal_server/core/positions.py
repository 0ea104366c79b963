"""Ordered positions of a job's members."""

from bisect import bisect_left, insort
from typing import NamedTuple


class ClockPosition(NamedTuple):
    """Ordered position of a member within a job."""

    clock: int
    pulled: bool = False
    """True if the member has this round's values, and asks to push."""


class PositionIndex:
    """Names by position; each name has one position."""

    def __init__(self) -> None:
        self._at: dict[str, ClockPosition] = {}
        # Names at a position, by arrival.
        self._names: dict[ClockPosition, dict[str, None]] = {}
        self._positions: list[ClockPosition] = []
        """Occupied positions, in order."""

    def move(self, name: str, position: ClockPosition) -> None:
        if self._at.get(name) == position:
            return
        self.drop(name)
        self._at[name] = position
        names = self._names.get(position)
        if names is None:
            names = self._names[position] = {}
            insort(self._positions, position)
        names[name] = None

    def drop(self, name: str) -> None:
        position = self._at.pop(name, None)
        if position is None:
            return
        names = self._names[position]
        del names[name]
        if not names:
            del self._names[position]
            del self._positions[bisect_left(self._positions, position)]

    @property
    def lowest(self) -> ClockPosition | None:
        return self._positions[0] if self._positions else None

    def first(self, but: str) -> ClockPosition | None:
        """Lowest position of a name other than `but`, if any."""
        return self._end(0, 1, but)

    def last(self, but: str) -> ClockPosition | None:
        """Highest position of a name other than `but`, if any."""
        return self._end(-1, -2, but)

    def is_occupied(self, position: ClockPosition, but: str) -> bool:
        """True if a name other than `but` has this position."""
        names = self._names.get(position, {})
        return len(names) > (but in names)

    def names_at(self, position: ClockPosition) -> "dict[str, None]":
        """Names at a position. Do not change the result."""
        return self._names.get(position, {})

    def _end(self, end: int, beside: int, but: str) -> ClockPosition | None:
        if not self._positions:
            return None
        position = self._positions[end]
        if self.is_occupied(position, but):
            return position
        return self._positions[beside] if len(self._positions) > 1 else None
