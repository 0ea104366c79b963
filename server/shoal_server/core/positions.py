"""Where the members of a job stand, ordered, so that the first and the last are found at once.

A `PositionIndex` answers who is first or last but for one of them, and who stands at a position,
in a time that grows with the logarithm of the members.
"""

from bisect import bisect_left, insort
from typing import NamedTuple


class Position(NamedTuple):
    """Places within a job, in order."""

    clock: int
    pulled: bool = False
    """It has the values of this round, and asks to push."""


class PositionIndex:
    """Names by position. Each has one at most."""

    def __init__(self) -> None:
        self._at: dict[str, Position] = {}
        # The names at a position, in the order in which they came to it.
        self._names: dict[Position, dict[str, None]] = {}
        self._positions: list[Position] = []
        """Those at which somebody stands, in order."""

    def put(self, name: str, position: Position) -> None:
        """The name stands here now, and nowhere else."""
        if self._at.get(name) == position:
            return
        self.drop(name)
        self._at[name] = position
        here = self._names.get(position)
        if here is None:
            here = self._names[position] = {}
            insort(self._positions, position)
        here[name] = None

    def drop(self, name: str) -> None:
        """The name stands nowhere."""
        position = self._at.pop(name, None)
        if position is None:
            return
        here = self._names[position]
        del here[name]
        if not here:
            del self._names[position]
            del self._positions[bisect_left(self._positions, position)]

    @property
    def lowest(self) -> Position | None:
        return self._positions[0] if self._positions else None

    def first(self, but: str) -> Position | None:
        """The lowest position of anybody but one; None where nobody else is."""
        return self._end(0, 1, but)

    def last(self, but: str) -> Position | None:
        """The highest position of anybody but one; None where nobody else is."""
        return self._end(-1, -2, but)

    def is_at(self, position: Position, but: str) -> bool:
        """Whether anybody but one stands there."""
        here = self._names.get(position, {})
        return len(here) > (but in here)

    def names_at(self, position: Position) -> "dict[str, None]":
        """Who stands there. Do not change it."""
        return self._names.get(position, {})

    def _end(self, end: int, beside: int, but: str) -> Position | None:
        if not self._positions:
            return None
        position = self._positions[end]
        if self.is_at(position, but):
            return position
        return self._positions[beside] if len(self._positions) > 1 else None
