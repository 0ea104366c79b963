"""Host memory for copies of state, one rank's pieces behind each other, used again and again."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shoal.state.inventory import Meta
from shoal.state.shards import Box, Holding, Json, Piece

# Every piece starts at a multiple of this, so that any dtype can be viewed there.
_ALIGNMENT_BYTES = 64


class Shelf:
    """One buffer with pieces in it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def arrange(
        self, boxes: Mapping[str, Box], metas: Mapping[str, Meta]
    ) -> tuple[dict[str, Piece], Tensor]:
        """Pieces with nothing in them yet, in the order of `boxes`, and the memory they lie in.

        Those of the last time are gone. Takes new memory only if the size is another.
        """
        places = {}
        end = 0
        for name, box in boxes.items():
            num_bytes = box.num_elements * metas[name].dtype.itemsize
            places[name] = slice(end, end + num_bytes)
            end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._memory.numel() != end:
            # Let go of the old memory before the new is taken.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(end, dtype=torch.uint8)
        pieces = {
            name: Piece(
                shape=metas[name].shape,
                box=box,
                tensor=self._memory[places[name]].view(metas[name].dtype).view(box.sizes),
            )
            for name, box in boxes.items()
        }
        return pieces, self._memory

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()


class Slot:
    """What one rank keeps of one step: its own snapshot, and what peers have given it.

    Written by one thread at a time; `shown` may be called by any.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.full = False
        """Whether all that this rank is to have of the step is here."""
        self.everywhere = False
        """Whether all ranks have completed this step."""
        self.own: Holding | None = None
        self.travelling = torch.empty(0, dtype=torch.uint8)
        """The memory of what goes to peers of the own snapshot."""
        self._peers: dict[int, Holding] = {}
        self._names: frozenset[str] = frozenset()
        self._knows = False
        self._staying = Shelf()
        self._leaving = Shelf()
        self._given: dict[int, Shelf] = {}

    def clear(self) -> None:
        """Show nothing any more: the memory is about to be written."""
        self.step, self.full, self.everywhere = None, False, False
        self.own, self._peers = None, {}

    def take(self, holding: Holding, travels: Callable[[str], bool]) -> None:
        """Make a snapshot of the holding."""
        metas = {
            name: Meta(piece.shape, piece.tensor.dtype) for name, piece in holding.pieces.items()
        }
        leaving = {n: p.box for n, p in sorted(holding.pieces.items()) if travels(n)}
        staying = {n: p.box for n, p in holding.pieces.items() if n not in leaving}
        pieces, self.travelling = self._leaving.arrange(leaving, metas)
        pieces |= self._staying.arrange(staying, metas)[0]
        for name, piece in pieces.items():
            piece.tensor.copy_(holding.pieces[name].tensor.detach())
        self._names, self._knows = holding.elsewhere, bool(holding.elsewhere)
        self.own = Holding(
            step=holding.step, pieces=pieces, values=holding.values, elsewhere=self._names
        )
        self.step = holding.step

    def know(self, names: frozenset[str]) -> None:
        """Learn the names of all tensors that exist at this step."""
        assert self.own is not None
        self._names |= names
        self.own = Holding(
            step=self.own.step,
            pieces=self.own.pieces,
            values=self.own.values,
            elsewhere=self._names,
        )
        # Behind that: the trainer may ask at any moment.
        self._knows = True

    def room_for(
        self, peer: int, boxes: Mapping[str, Box], metas: Mapping[str, Meta]
    ) -> tuple[dict[str, Piece], Tensor]:
        """Pieces for what the peer is about to send, and the memory that it goes to as it comes."""
        shelf = self._given.setdefault(peer, Shelf())
        return shelf.arrange(dict(sorted(boxes.items())), metas)

    def show(self, peer: int, pieces: Mapping[str, Piece], values: Mapping[str, Json]) -> None:
        """The peer's part is complete."""
        assert self.step is not None
        holding = Holding(step=self.step, pieces=pieces, values=values, elsewhere=self._names)
        self._peers = {**self._peers, peer: holding}

    def shown(self) -> list[Holding]:
        """All that is complete.

        The own snapshot only once it is known what else there was: alone it might be taken for the
        whole of a state of which a lost rank held what nobody else can name. Before the first step
        there is the model and no more.
        """
        own, peers = self.own, self._peers
        known = own is not None and (own.step == 0 or bool(own.elsewhere))
        return [*([own] if own is not None and known else []), *peers.values()]

    @property
    def num_bytes(self) -> int:
        shelves = (self._staying, self._leaving, *self._given.values())
        return sum(shelf.num_bytes for shelf in shelves)


__all__ = ["Shelf", "Slot"]
