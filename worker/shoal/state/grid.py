"""A tensor cut at the bounds of all boxes that are held of it."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from shoal.state.shards import Box


class Grid:
    """A tensor cut wherever a held box begins or ends: each cell is in a box wholly or not at all.

    Takes memory for every cell that is held: for rows or columns as many as boxes, for a mesh of
    both as many as ranks.
    """

    def __init__(self, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
        self._cuts: list[list[int]] = []
        for dimension, extent in enumerate(shape):
            starts = {box.offsets[dimension] for box in boxes}
            stops = {box.offsets[dimension] + box.sizes[dimension] for box in boxes}
            self._cuts.append(sorted({0, extent} | starts | stops))
        self._held: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._cells: dict[Box, Sequence[tuple[Box, tuple[int, ...]]]] = {}
        for number, box in enumerate(boxes):
            for cell in product(*self._ranges(box)):
                self._held[cell] = (*self._held.get(cell, ()), number)

    def cells(self, box: Box) -> Sequence[tuple[Box, tuple[int, ...]]]:
        """The parts into which the grid cuts `box`, and the numbers of the boxes that have each."""
        if box not in self._cells:
            # Asked for by many tensors: what each rank holds and needs of one, it does of the next.
            self._cells[box] = list(self._cut(box))
        return self._cells[box]

    def _cut(self, box: Box) -> Iterator[tuple[Box, tuple[int, ...]]]:
        stops = tuple(o + s for o, s in zip(box.offsets, box.sizes, strict=True))
        for cell in product(*self._ranges(box)):
            start = tuple(
                max(cuts[at], low)
                for cuts, at, low in zip(self._cuts, cell, box.offsets, strict=True)
            )
            sizes = tuple(
                min(cuts[at + 1], high) - low
                for cuts, at, low, high in zip(self._cuts, cell, start, stops, strict=True)
            )
            yield Box(offsets=start, sizes=sizes), self._held.get(cell, ())

    def gaps(self) -> Iterator[Box]:
        """The cells that no box has."""
        if len(self._held) < math.prod(len(cuts) - 1 for cuts in self._cuts):
            shape = tuple(cuts[-1] for cuts in self._cuts)
            yield from (cell for cell, numbers in self.cells(Box.whole(shape)) if not numbers)

    def _ranges(self, box: Box) -> Iterator[range]:
        for cuts, start, size in zip(self._cuts, box.offsets, box.sizes, strict=True):
            yield range(bisect_right(cuts, start) - 1, bisect_left(cuts, start + size))


@lru_cache(maxsize=1024)
def grid_of(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Grid:
    # Parameters, their optimizer state and equal layers are cut in the same way.
    return Grid(shape, boxes)


__all__ = ["Grid", "grid_of"]
