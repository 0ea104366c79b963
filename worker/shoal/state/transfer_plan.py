"""Who sends what to whom, so that each rank gets what it needs of a step's state.

Pure: every rank computes its own share from the same facts, and the shares fit together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.state.grid import grid_of
from shoal.state.shards import Box
from shoal.state.step_choice import Chosen


@dataclass(frozen=True)
class Part:
    """A box of a tensor that goes in one piece."""

    name: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank does. Sender and receiver have the parts between them in the same order."""

    kept: list[Part] = field(default_factory=list)
    """What it has itself of what it needs."""
    sends: dict[int, list[Part]] = field(default_factory=dict)
    """By receiver; each lies within one box that this rank holds."""
    receives: dict[int, list[Part]] = field(default_factory=dict)
    """By sender."""


def plan(
    chosen: Chosen, needs: Sequence[Mapping[str, Box]], rank: int, *, stripe_bytes: int
) -> Plan:
    """What this rank sends and receives, so that every rank gets what it needs (a box by name).

    What a rank holds itself does not travel. For the rest think of all tensors as lying behind each
    other, row by row, and cut that into stripes: those who hold something take turns at sending
    it, stripe by stripe and receiver by receiver. So senders share the bytes evenly, to a stripe or
    so, and each rank knows its own share without going through those of all the others. No part is
    larger than two stripes.
    """
    own = Plan()
    start_bytes = 0
    for name, meta in chosen.metas.items():
        source = _Source(
            Part(name, Box.whole(meta.shape)),
            meta.dtype.itemsize,
            chosen.holders[name],
            rank=rank,
            stripes=(start_bytes, stripe_bytes),
        )
        start_bytes += math.prod(meta.shape) * meta.dtype.itemsize
        wanted: dict[Box, list[int]] = {}
        for receiver, boxes in enumerate(needs):
            if (box := boxes.get(name)) is not None:
                wanted.setdefault(box, []).append(receiver)
        if name in needs[rank]:
            source.note_received(needs[rank][name], own)
        for box, receivers in wanted.items():
            source.note_sent(box, receivers, own)
    return own


class _Source:
    """Who has what of one tensor."""

    def __init__(
        self,
        whole: Part,
        itemsize: int,
        held: Mapping[Box, Sequence[int]],
        *,
        rank: int,
        stripes: tuple[int, int],
    ) -> None:
        self._name, self._shape = whole.name, whole.box.sizes
        self._itemsize = itemsize
        self._rank = rank
        self._start_bytes, self._stripe_bytes = stripes
        self._grid = grid_of(self._shape, tuple(held))
        self._ranks = list(held.values())
        self._own = [box for box, ranks in held.items() if rank in ranks]
        self._holders: dict[tuple[int, ...], list[int]] = {}

    def note_received(self, box: Box, own: Plan) -> None:
        """What this rank keeps and receives to fill the box."""
        if box in self._own:
            own.kept.append(Part(self._name, box))
            return
        for cell, numbers in self._grid.cells(box):
            holders = self._holders_of(numbers)
            assert holders, f"{self._name} {cell} is held by nobody"
            if self._rank in holders:
                own.kept.append(Part(self._name, cell))
                continue
            for stripe, part in self._striped(cell):
                sender = holders[(stripe + self._rank) % len(holders)]
                own.receives.setdefault(sender, []).append(Part(self._name, part))

    def note_sent(self, box: Box, receivers: Sequence[int], own: Plan) -> None:
        """What this rank sends to those who all need this box."""
        cells: dict[Box, tuple[int, ...]] = {}
        for mine in self._own:
            if (common := mine.overlap(box)) is not None:
                cells.update(self._grid.cells(common))
        for cell in sorted(cells):  # as the receivers come upon them
            holders = self._holders_of(cells[cell])
            lacking = [receiver for receiver in receivers if receiver not in holders]
            if not lacking:
                continue
            for stripe, part in self._striped(cell):
                for receiver in lacking:
                    if holders[(stripe + receiver) % len(holders)] == self._rank:
                        own.sends.setdefault(receiver, []).append(Part(self._name, part))

    def _holders_of(self, numbers: tuple[int, ...]) -> list[int]:
        if numbers not in self._holders:
            found = {rank for number in numbers for rank in self._ranks[number]}
            self._holders[numbers] = sorted(found)
        return self._holders[numbers]

    def _striped(self, cell: Box) -> Iterator[tuple[int, Box]]:
        """The cell in parts that lie in one stripe each, with the number of the stripe."""
        return self._cut(cell, 0, self._start_bytes)

    def _cut(self, cell: Box, dimension: int, start_bytes: int) -> Iterator[tuple[int, Box]]:
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


def _narrow(box: Box, dimension: int, offset: int, size: int) -> Box:
    return Box(
        offsets=(*box.offsets[:dimension], offset, *box.offsets[dimension + 1 :]),
        sizes=(*box.sizes[:dimension], size, *box.sizes[dimension + 1 :]),
    )


__all__ = ["Part", "Plan", "plan"]
