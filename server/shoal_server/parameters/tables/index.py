"""Index from row ids to positions in a shard's arrays, for many ids at once.

A hash table with open addressing: all ids make their first probe together, the ids that need
another make the second, and so on. Probe n + 1 is n slots after probe n. As the number of slots is
a power of two, the probes reach every slot (Knuth, TAOCP 3, 6.4, exercise 20).
"""

from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_server.parameters.tables.growing import GrowingTensor
from shoal_server.parameters.tables.hashing import Ids, hash_ids

EMPTY = -1
REMOVED = -2
"""A slot whose row was removed: searches continue after it."""
LOAD_LIMIT = 0.6
MIN_SLOTS = 16
MAX_ROWS = 2**31 - 1

Rows = NDArray[np.int64]


class RowIndex:
    """Maps ids to rows. Rows are numbers from 0 that the caller assigns."""

    def __init__(self) -> None:
        self._ids = GrowingTensor(MIN_SLOTS, (), torch.int64)
        self._slots: NDArray[np.int32] = np.full(MIN_SLOTS, EMPTY, np.int32)
        self._num_rows = 0
        self._num_used = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def ids(self) -> Ids:
        """Ids by row; undefined for rows that are not in use. Do not keep this array."""
        ids: Ids = self._ids.tensor.numpy()
        return ids

    @property
    def id_tensor(self) -> Tensor:
        """`ids` as a tensor over the same memory. Do not keep it."""
        return self._ids.tensor

    @property
    def num_bytes(self) -> int:
        return len(self._ids) * self._ids.row_bytes + self._slots.nbytes

    def reserve(self, top_row: int, num_more: int) -> None:
        """Allocate memory for `num_more` more rows, all below `top_row`."""
        self._grow(top_row, num_more)

    def has_memory_for(self, top_row: int, num_more: int) -> bool:
        """True if `reserve` would allocate nothing."""
        return top_row <= len(self._ids) and not self.moves_for(num_more)

    def moves_for(self, num_more: int) -> bool:
        """True if inserting `num_more` rows rebuilds the slots."""
        return self._num_used + num_more > LOAD_LIMIT * self._slots.size

    def find(self, ids: Ids) -> Rows:
        """Return the row of each id, -1 for ids without one."""
        slots = self._first_slots(ids)
        rows, ids_by_row = self._slots[slots], self.ids
        # As indices, EMPTY and REMOVED read unrelated ids.
        hit = (ids_by_row[rows] == ids) & (rows >= 0)
        result = np.where(hit, rows, EMPTY).astype(np.int64)
        todo = np.flatnonzero(~hit & (rows != EMPTY))
        slots, todo_ids = slots[todo], ids[todo]
        for step in count(1):
            if not todo.size:
                break
            slots = (slots + step) & (self._slots.size - 1)
            rows = self._slots[slots]
            hit = (ids_by_row[rows] == todo_ids) & (rows >= 0)
            result[todo[hit]] = rows[hit]
            goes_on = ~hit & (rows != EMPTY)
            todo, slots, todo_ids = todo[goes_on], slots[goes_on], todo_ids[goes_on]
        return result

    def insert(self, ids: Ids, rows: Rows) -> None:
        """Insert distinct ids that have no row."""
        self._grow(int(rows.max(initial=0)) + 1, len(ids))
        self.ids[rows] = ids
        self._settle(ids, rows)
        self._num_rows += len(ids)

    def remove(self, rows: Rows) -> None:
        """Remove distinct rows that are in use."""
        self._num_rows -= len(rows)
        slots = self._first_slots(self.ids[rows])
        for step in count(1):
            if not rows.size:
                break
            is_here = self._slots[slots] == rows
            self._slots[slots[is_here]] = REMOVED
            rows, slots = rows[~is_here], slots[~is_here]
            slots = (slots + step) & (self._slots.size - 1)

    def _first_slots(self, ids: Ids) -> Rows:
        return (hash_ids(ids) & np.uint64(self._slots.size - 1)).view(np.int64)

    def _settle(self, ids: Ids, rows: Rows) -> None:
        slots = self._first_slots(ids)
        for step in count(1):
            if not rows.size:
                break
            before = self._slots[slots]
            is_free = before < 0
            # If several ids write to one slot, one of them gets it.
            self._slots[slots[is_free]] = rows[is_free]
            has_slot = self._slots[slots] == rows
            self._num_used += int(np.count_nonzero(has_slot & (before == EMPTY)))
            rows, slots = rows[~has_slot], slots[~has_slot]
            slots = (slots + step) & (self._slots.size - 1)

    def _grow(self, top_row: int, num_more: int) -> None:
        if top_row > len(self._ids):
            self._ids.grow(max(top_row, 2 * len(self._ids)))
        if not self.moves_for(num_more):
            return
        num_slots = self._slots.size
        while self._num_rows + num_more > LOAD_LIMIT * num_slots:
            num_slots *= 2
        rows = self._slots[self._slots >= 0].astype(np.int64)
        self._slots = np.full(num_slots, EMPTY, np.int32)
        self._num_used = 0
        self._settle(self.ids[rows], rows)
