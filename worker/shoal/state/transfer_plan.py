"""Plan of sends and receives by which each rank gets the chunks that it needs.

Pure: every rank computes its own part from the same inputs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.state.grid import grid_of
from shoal.state.inventory import Meta
from shoal.state.shards import Chunk, Names, groups_of, partition_names
from shoal.state.step_choice import ChosenStep


@dataclass(frozen=True)
class NamedChunk:
    """Chunk of a named tensor that is sent as a unit."""

    name: str
    chunk: Chunk


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Plan of one rank. A sender and its receiver list their parts in the same order."""

    kept: list[NamedChunk] = field(default_factory=list)
    sends: dict[int, list[NamedChunk]] = field(default_factory=dict)
    """Parts by receiver; each lies within one chunk that this rank holds."""
    receives: dict[int, list[NamedChunk]] = field(default_factory=dict)


def plan(
    chosen: ChosenStep, needs: Sequence[Mapping[str, Chunk]], rank: int, *, stripe_bytes: int
) -> TransferPlan:
    """Plan what this rank keeps, sends and receives.

    `needs`: by rank, the needed chunks by the name of their tensor.

    Imagine all tensors end to end, row by row, and cut into stripes. If a rank lacks a part, the
    stripe and the rank select the sender among the holders. So senders share the bytes evenly, and
    no part is larger than two stripes.
    """
    own_plan = TransferPlan()
    wanted = _wanted(needs)
    sources: dict[tuple[int, int, tuple[int, ...]], _Source] = {}
    start_bytes = 0
    for name, meta in chosen.metas.items():
        held, wanting = chosen.holders[name], wanted.get(name, _NOBODY)
        # Tensors that are held and needed in the same way share one computation.
        key = (id(held), id(wanting), meta.shape)
        if key not in sources:
            sources[key] = _Source(meta.shape, held, wanting, rank)
        sources[key].note(name, _Stripes(meta, start_bytes, stripe_bytes), own_plan)
        start_bytes += math.prod(meta.shape) * meta.dtype.itemsize
    return own_plan


Wanted = Mapping[Chunk, Sequence[int]]
_NOBODY: Wanted = {}


def _wanted(needs: Sequence[Mapping[str, Chunk]]) -> Mapping[str, Wanted]:
    """Return the needs by name; tensors with the same needs share one dict."""
    needed = [
        (receiver, chunk, names)
        for receiver, chunks in enumerate(needs)
        for chunk, names in groups_of(chunks)
    ]
    sets = partition_names(names for _, _, names in needed)
    found: dict[Names, dict[Chunk, list[int]]] = {}
    for receiver, chunk, names in needed:
        for together in sets[names]:
            found.setdefault(together, {}).setdefault(chunk, []).append(receiver)
    return {name: chunks for together, chunks in found.items() for name in together}


class _Source:
    """Holders and receivers of each cell (see `grid_of`), for tensors that share both."""

    def __init__(
        self, shape: tuple[int, ...], held: Mapping[Chunk, Sequence[int]], wanted: Wanted, rank: int
    ) -> None:
        self._rank = rank
        self._grid = grid_of(shape, tuple(held))
        self._ranks = list(held.values())
        self._own = [chunk for chunk, ranks in held.items() if rank in ranks]
        self._holders: dict[tuple[int, ...], list[int]] = {}
        self._kept: list[Chunk] = []
        self._received: list[tuple[Chunk, Sequence[int]]] = []
        self._sent: list[tuple[Chunk, Sequence[int], Sequence[int]]] = []
        """Cells, the ranks that hold each, and the ranks that need and lack it."""
        for chunk, receivers in wanted.items():
            if rank in receivers:
                self._receive(chunk)
            self._send(chunk, receivers)

    def _receive(self, chunk: Chunk) -> None:
        if chunk in self._own:
            self._kept.append(chunk)
            return
        for cell, numbers in self._grid.cells(chunk):
            holders = self._holders_of(numbers)
            assert holders, f"{cell} has no holder"
            if self._rank in holders:
                self._kept.append(cell)
            else:
                self._received.append((cell, holders))

    def _send(self, chunk: Chunk, receivers: Sequence[int]) -> None:
        cells: dict[Chunk, tuple[int, ...]] = {}
        for held in self._own:
            if (common := held.overlap(chunk)) is not None:
                cells.update(self._grid.cells(common))
        for cell in sorted(cells):  # in the receivers' order
            holders = self._holders_of(cells[cell])
            lacking = [receiver for receiver in receivers if receiver not in holders]
            if lacking:
                self._sent.append((cell, holders, lacking))

    def note(self, name: str, stripes: "_Stripes", own_plan: TransferPlan) -> None:
        own_plan.kept.extend(NamedChunk(name, cell) for cell in self._kept)
        for cell, holders in self._received:
            for stripe, part in stripes.of(cell):
                sender = holders[(stripe + self._rank) % len(holders)]
                own_plan.receives.setdefault(sender, []).append(NamedChunk(name, part))
        for cell, holders, lacking in self._sent:
            for stripe, part in stripes.of(cell):
                for receiver in lacking:
                    if holders[(stripe + receiver) % len(holders)] == self._rank:
                        own_plan.sends.setdefault(receiver, []).append(NamedChunk(name, part))

    def _holders_of(self, numbers: tuple[int, ...]) -> list[int]:
        if numbers not in self._holders:
            found = {rank for number in numbers for rank in self._ranks[number]}
            self._holders[numbers] = sorted(found)
        return self._holders[numbers]


class _Stripes:
    def __init__(self, meta: Meta, start_bytes: int, stripe_bytes: int) -> None:
        self._shape, self._itemsize = meta.shape, meta.dtype.itemsize
        self._start_bytes, self._stripe_bytes = start_bytes, stripe_bytes

    def of(self, cell: Chunk) -> Iterator[tuple[int, Chunk]]:
        return self._cut(cell, 0, self._start_bytes)

    def _cut(self, cell: Chunk, dimension: int, start_bytes: int) -> Iterator[tuple[int, Chunk]]:
        """Cut along this dimension; if a row is larger than a stripe, along the next ones too."""
        if dimension == len(cell.sizes):
            yield start_bytes // self._stripe_bytes, cell
            return
        row_bytes = math.prod(self._shape[dimension + 1 :]) * self._itemsize
        at = cell.offsets[dimension]
        stop = at + cell.sizes[dimension]
        while at < stop:
            position = start_bytes + at * row_bytes
            stripe = position // self._stripe_bytes
            # A row belongs to the stripe in which it starts.
            left_bytes = (stripe + 1) * self._stripe_bytes - position
            count = min(-(-left_bytes // row_bytes), stop - at)
            run = _narrow(cell, dimension, at, count)
            if row_bytes > self._stripe_bytes:
                yield from self._cut(run, dimension + 1, position)
            else:
                yield stripe, run
            at += count


def _narrow(chunk: Chunk, dimension: int, offset: int, size: int) -> Chunk:
    return Chunk(
        offsets=(*chunk.offsets[:dimension], offset, *chunk.offsets[dimension + 1 :]),
        sizes=(*chunk.sizes[:dimension], size, *chunk.sizes[dimension + 1 :]),
    )
