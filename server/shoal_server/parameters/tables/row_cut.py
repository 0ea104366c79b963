"""A cut through the rows of a shard: a row that changes later is copied aside, once."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_server.parameters.cuts.shard_cut import CHUNK_BYTES, released
from shoal_server.parameters.tables.growing import GrowingTensor
from shoal_server.parameters.tables.index import Rows
from shoal_server.parameters.tables.row_chunks import RowChunks

IDS = "ids"
BIRTHS = "births"
FIRST_SAVED = 256


class Columns(Protocol):
    """The rows of a store as they are now."""

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """By name, with ids; each has a row for each row of the store, and maybe more."""
        ...


class RowCut:
    """Rows below `num_rows`, as of the moment that it was made. `save` and `read` are called under
    the lock of the store's content."""

    def __init__(self, store: Columns, num_rows: int, num_live: int) -> None:
        self._store = store
        self._num_live = num_live
        columns = {name: (each.shape[1:], each.dtype) for name, each in store.columns.items()}
        self._chunks = RowChunks(columns, num_rows, CHUNK_BYTES)
        self._is_released = np.zeros(len(self._chunks), np.bool_)
        # Zeros that nobody has written to take no memory and no time.
        self._saved_at = np.zeros(num_rows, np.int32)
        """For each row its place among the saved ones, counted from 1; 0: not saved."""
        self._saved = {
            name: GrowingTensor(FIRST_SAVED, shape, dtype)
            for name, (shape, dtype) in columns.items()
        }
        self._num_saved = 0
        self._row_bytes = sum(each.row_bytes for each in self._saved.values())
        self.described = self._chunks.described

    def __len__(self) -> int:
        return len(self._chunks)

    def size_of(self, index: int) -> int:
        return self._chunks.size_of(index)

    def save(self, rows: Rows) -> None:
        """These rows, each named once, are about to change."""
        rows = rows[rows < self._chunks.num_rows]
        rows = rows[self._saved_at[rows] == 0]
        rows = rows[~self._is_released[rows // self._chunks.rows_each]]
        if not rows.size:
            return
        start, stop = self._num_saved, self._num_saved + len(rows)
        at = torch.from_numpy(rows)
        for name, column in self._store.columns.items():
            saved = self._saved[name]
            if stop > len(saved):
                saved.grow(max(stop, 2 * len(saved)))
            torch.index_select(column, 0, at, out=saved.tensor[start:stop])
        self._saved_at[rows] = np.arange(start + 1, stop + 1)
        self._num_saved = stop

    def read(self, index: int) -> Buffer:
        if self._is_released[index]:
            raise released(index)
        rows = self._chunks.rows(index)
        data = np.empty(self._chunks.size_of(index), np.uint8).data
        places = self._saved_at[rows]
        changed = np.flatnonzero(places)
        at, saved_at = torch.from_numpy(changed), torch.from_numpy(places[changed] - 1)
        for name, view in self._chunks.views(index, data).items():
            view.copy_(self._store.columns[name][rows])
            if changed.size:
                view[at] = self._saved[name].tensor.index_select(0, saved_at)
        return data

    def release(self, index: int) -> None:
        self._is_released[index] = True

    def close(self) -> None:
        self._is_released[:] = True
        for saved in self._saved.values():
            saved.free()
        self._num_saved = 0

    @property
    def held_bytes(self) -> int:
        return self._num_saved * self._row_bytes + self._saved_at.nbytes

    def tensors(self, read: Callable[[int], Buffer]) -> Mapping[str, Tensor]:
        """The rows that there were, in the order of their ids: stores with the same rows give the
        same."""
        made = {
            name: torch.empty((self._num_live, *saved.row_shape), dtype=saved.dtype)
            for name, saved in self._saved.items()
        }
        start = 0
        for index in range(len(self)):
            views = self._chunks.views(index, read(index))
            live = views[BIRTHS].nonzero().view(-1)
            for name, view in views.items():
                made[name][start : start + len(live)] = view.index_select(0, live)
            start += len(live)
        order = torch.from_numpy(np.argsort(made[IDS].numpy(), kind="stable"))
        # One after the other, so that no more than one of them is there twice.
        for name in list(made):
            made[name] = made[name].index_select(0, order)
        return made
