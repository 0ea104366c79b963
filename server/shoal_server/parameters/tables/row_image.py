"""An image of a shard's rows: each row is saved once, before its first change."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import TensorImage
from shoal_server.parameters.images.image import TensorStream
from shoal_server.parameters.images.shard_image import CHUNK_BYTES, Locked, released
from shoal_server.parameters.tables.growing import GrowingTensor
from shoal_server.parameters.tables.index import Rows
from shoal_server.parameters.tables.row_chunks import RowChunks

IDS = "ids"
BIRTHS = "births"
FIRST_SAVED = 256


class Columns(Protocol):
    """The part of a `RowStore` that its images use."""

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Columns by name, and the ids."""
        ...


class RowImage:
    """The rows below `num_rows`, as of the image's version. Call `save` and `read` under the lock
    of the store's content."""

    def __init__(self, store: Columns, num_rows: int, num_live: int) -> None:
        self._store = store
        self._num_live = num_live
        columns = {name: (each.shape[1:], each.dtype) for name, each in store.columns.items()}
        self._chunks = RowChunks(columns, num_rows, CHUNK_BYTES)
        self._is_released = np.zeros(len(self._chunks), np.bool_)
        # Zeros that are never written to take no memory and no time.
        self._saved_at = np.zeros(num_rows, np.int32)
        """Position of each row among the saved rows, counted from 1; 0: not saved."""
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
        """Save distinct rows that are about to change."""
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
        columns, views = self._store.columns, self._chunks.views(index, data)
        for name, view in views.items():
            view.copy_(columns[name][rows])
        self._put_back(rows, views)
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

    def streams(self, locked: Locked) -> Sequence[TensorStream]:
        streams = []
        for each in self.described:
            shape = (self._num_live, *self._saved[each.name].row_shape)
            num_bytes = self._num_live * self._saved[each.name].row_bytes
            live = TensorImage(name=each.name, dtype=each.dtype, shape=shape, num_bytes=num_bytes)
            streams.append(TensorStream(live, self._live(each.name, locked)))
        return streams

    def _live(self, name: str, locked: Locked) -> Iterator[Tensor]:
        for index in range(len(self)):
            columns = locked(partial(self._columns_of, index, {BIRTHS, name}))
            yield columns[name].index_select(0, columns[BIRTHS].nonzero().view(-1))

    def _columns_of(self, index: int, names: Collection[str]) -> Mapping[str, Tensor]:
        if self._is_released[index]:
            raise released(index)
        rows = self._chunks.rows(index)
        columns = self._store.columns
        copies = {name: columns[name][rows].clone() for name in names}
        self._put_back(rows, copies)
        return copies

    def _put_back(self, rows: slice, copies: Mapping[str, Tensor]) -> None:
        saved_positions = self._saved_at[rows]
        changed = np.flatnonzero(saved_positions)
        if not changed.size:
            return
        at, saved_at = torch.from_numpy(changed), torch.from_numpy(saved_positions[changed] - 1)
        for name, copy in copies.items():
            copy[at] = self._saved[name].tensor.index_select(0, saved_at)
