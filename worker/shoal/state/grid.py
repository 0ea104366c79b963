"""Grid of a tensor, cut at the bounds of all its chunks that ranks hold."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from shoal.state.shards import Chunk


class Grid:
    """Cells of a tensor, cut wherever a held chunk begins or ends. Only cells that a rank holds are
    stored."""

    def __init__(self, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
        self._cuts: list[list[int]] = []
        for dimension, extent in enumerate(shape):
            starts = {chunk.offsets[dimension] for chunk in chunks}
            stops = {chunk.offsets[dimension] + chunk.sizes[dimension] for chunk in chunks}
            self._cuts.append(sorted({0, extent} | starts | stops))
        self._held: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._cells: dict[Chunk, Sequence[tuple[Chunk, tuple[int, ...]]]] = {}
        for number, chunk in enumerate(chunks):
            for cell in product(*self._ranges(chunk)):
                self._held[cell] = (*self._held.get(cell, ()), number)

    def cells(self, chunk: Chunk) -> Sequence[tuple[Chunk, tuple[int, ...]]]:
        """Return the parts of `chunk`, each with the indexes of the held chunks that contain it."""
        if chunk not in self._cells:
            self._cells[chunk] = list(self._cut(chunk))
        return self._cells[chunk]

    def _cut(self, chunk: Chunk) -> Iterator[tuple[Chunk, tuple[int, ...]]]:
        stops = tuple(o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        for cell in product(*self._ranges(chunk)):
            start = tuple(
                max(cuts[at], low)
                for cuts, at, low in zip(self._cuts, cell, chunk.offsets, strict=True)
            )
            sizes = tuple(
                min(cuts[at + 1], high) - low
                for cuts, at, low, high in zip(self._cuts, cell, start, stops, strict=True)
            )
            yield Chunk(offsets=start, sizes=sizes), self._held.get(cell, ())

    def uncovered_cells(self) -> Iterator[Chunk]:
        """Yield the cells that no chunk contains."""
        if len(self._held) < math.prod(len(cuts) - 1 for cuts in self._cuts):
            shape = tuple(cuts[-1] for cuts in self._cuts)
            yield from (cell for cell, numbers in self.cells(Chunk.whole(shape)) if not numbers)

    def _ranges(self, chunk: Chunk) -> Iterator[range]:
        for cuts, start, size in zip(self._cuts, chunk.offsets, chunk.sizes, strict=True):
            yield range(bisect_right(cuts, start) - 1, bisect_left(cuts, start + size))


@lru_cache(maxsize=1024)
def grid_of(shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> Grid:
    return Grid(shape, chunks)
