"""Who sends what to whom, so that each rank gets what it needs of a step's state.

Pure: every rank computes its own share from the same facts, and the shares fit together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.state.grid import grid_of
from shoal.state.shards import Chunk
from shoal.state.step_choice import ChosenStep


@dataclass(frozen=True)
class NamedChunk:
    """A chunk of a tensor that goes in one piece."""

    name: str
    chunk: Chunk


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """What one rank does. Sender and receiver have the parts between them in the same order."""

    kept: list[NamedChunk] = field(default_factory=list)
    """What it has itself of what it needs."""
    sends: dict[int, list[NamedChunk]] = field(default_factory=dict)
    """By receiver; each lies within one chunk that this rank holds."""
    receives: dict[int, list[NamedChunk]] = field(default_factory=dict)
    """By sender."""


def plan(
    chosen: ChosenStep, needs: Sequence[Mapping[str, Chunk]], rank: int, *, stripe_bytes: int
) -> TransferPlan:
    """What this rank sends and receives, so that every rank gets what it needs (a chunk by name).

    What a rank holds itself does not travel. For the rest think of all tensors as lying behind each
    other, row by row, and cut that into stripes: those who hold something take turns at sending
    it, stripe by stripe and receiver by receiver. So senders share the bytes evenly, to a stripe or
    so, and each rank knows its own share without going through those of all the others. No part is
    larger than two stripes.
    """
    own = TransferPlan()
    start_bytes = 0
    for name, meta in chosen.metas.items():
        source = _Source(
            NamedChunk(name, Chunk.whole(meta.shape)),
            meta.dtype.itemsize,
            chosen.holders[name],
            rank=rank,
            stripes=(start_bytes, stripe_bytes),
        )
        start_bytes += math.prod(meta.shape) * meta.dtype.itemsize
        wanted: dict[Chunk, list[int]] = {}
        for receiver, chunks in enumerate(needs):
            if (chunk := chunks.get(name)) is not None:
                wanted.setdefault(chunk, []).append(receiver)
        if name in needs[rank]:
            source.note_received(needs[rank][name], own)
        for chunk, receivers in wanted.items():
            source.note_sent(chunk, receivers, own)
    return own


class _Source:
    """Who has what of one tensor."""

    def __init__(
        self,
        whole: NamedChunk,
        itemsize: int,
        held: Mapping[Chunk, Sequence[int]],
        *,
        rank: int,
        stripes: tuple[int, int],
    ) -> None:
        self._name, self._shape = whole.name, whole.chunk.sizes
        self._itemsize = itemsize
        self._rank = rank
        self._start_bytes, self._stripe_bytes = stripes
        self._grid = grid_of(self._shape, tuple(held))
        self._ranks = list(held.values())
        self._own = [chunk for chunk, ranks in held.items() if rank in ranks]
        self._holders: dict[tuple[int, ...], list[int]] = {}

    def note_received(self, chunk: Chunk, own: TransferPlan) -> None:
        """What this rank keeps and receives to fill the chunk."""
        if chunk in self._own:
            own.kept.append(NamedChunk(self._name, chunk))
            return
        for cell, numbers in self._grid.cells(chunk):
            holders = self._holders_of(numbers)
            assert holders, f"{self._name} {cell} is held by nobody"
            if self._rank in holders:
                own.kept.append(NamedChunk(self._name, cell))
                continue
            for stripe, part in self._striped(cell):
                sender = holders[(stripe + self._rank) % len(holders)]
                own.receives.setdefault(sender, []).append(NamedChunk(self._name, part))

    def note_sent(self, chunk: Chunk, receivers: Sequence[int], own: TransferPlan) -> None:
        """What this rank sends to those who all need this chunk."""
        cells: dict[Chunk, tuple[int, ...]] = {}
        for mine in self._own:
            if (common := mine.overlap(chunk)) is not None:
                cells.update(self._grid.cells(common))
        for cell in sorted(cells):  # as the receivers come upon them
            holders = self._holders_of(cells[cell])
            lacking = [receiver for receiver in receivers if receiver not in holders]
            if not lacking:
                continue
            for stripe, part in self._striped(cell):
                for receiver in lacking:
                    if holders[(stripe + receiver) % len(holders)] == self._rank:
                        own.sends.setdefault(receiver, []).append(NamedChunk(self._name, part))

    def _holders_of(self, numbers: tuple[int, ...]) -> list[int]:
        if numbers not in self._holders:
            found = {rank for number in numbers for rank in self._ranks[number]}
            self._holders[numbers] = sorted(found)
        return self._holders[numbers]

    def _striped(self, cell: Chunk) -> Iterator[tuple[int, Chunk]]:
        """The cell in parts that lie in one stripe each, with the number of the stripe."""
        return self._cut(cell, 0, self._start_bytes)

    def _cut(self, cell: Chunk, dimension: int, start_bytes: int) -> Iterator[tuple[int, Chunk]]:
        """Cut along this dimension; where a row is more than a stripe, along the next ones."""
        if dimension == len(cell.sizes):
            yield start_bytes // self._stripe_bytes, cell
            return
        row_bytes = math.prod(self._shape[dimension + 1 :]) * self._itemsize
        at = cell.offsets[dimension]
        stop = at + cell.sizes[dimension]
        while at < stop:
            position = start_bytes + at * row_bytes
            stripe = position // self._stripe_bytes
            # A row is in the stripe in which it starts.
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
