"""Sets of positions as sorted, merged spans [start, stop)."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntegerSpans:
    """A set of integers. Memory and time grow with the number of gaps."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in spans:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """Number of spans, not of integers."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntegerSpans) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # the set is mutable

    def __repr__(self) -> str:
        return f"IntegerSpans({list(self)})"

    @property
    def size(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def intersection(self, start: int, stop: int) -> list[tuple[int, int]]:
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        pieces = zip(self._starts[first:last], self._stops[first:last], strict=True)
        return [(max(a, start), min(b, stop)) for a, b in pieces] if start < stop else []

    def add(self, start: int, stop: int) -> None:
        """Add [start, stop), merged with spans that it touches."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove what the set has of [start, stop)."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if start >= stop or first >= last:
            return
        left, right = self._starts[first], self._stops[last - 1]
        rest = [(a, b) for a, b in ((left, start), (stop, right)) if a < b]
        self._starts[first:last] = [a for a, _ in rest]
        self._stops[first:last] = [b for _, b in rest]

    def first(self) -> tuple[int, int]:
        """The lowest span. The set must not be empty."""
        return self._starts[0], self._stops[0]
