"""The rows of one shard: an index from ids to rows, and the columns of numbers."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import InternalError
from shoal_server.parameters.images.shard_image import OpenImages
from shoal_server.parameters.tables.growing import GrowingTensor
from shoal_server.parameters.tables.hashing import Ids
from shoal_server.parameters.tables.index import MAX_ROWS, RowIndex, Rows
from shoal_server.parameters.tables.optimizers import StateColumn
from shoal_server.parameters.tables.row_image import BIRTHS, IDS, RowImage

VALUES = "values"
LAST_PUSHED = "last_pushed_unix_s"
STATE = "optimizer/"
FIRST_CAPACITY = 64
DOUBLED_BYTES = 64 * 1024 * 1024
INDEX_BYTES_PER_ROW = 32
"""Upper bound: four slots of four bytes, and two ids."""


class RowStore:
    """Stores rows in memory that grows in place. New rows first take the positions of removed
    ones."""

    def __init__(self, dim: int, dtype: torch.dtype, columns: Mapping[str, StateColumn]) -> None:
        self._max_rows = MAX_ROWS
        self._index = RowIndex()
        self._fills = {name: column.fill for name, column in columns.items()}
        # In 16 bits, steps and averages would stop changing.
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            VALUES: ((dim,), dtype),
            BIRTHS: ((), torch.int64),
            LAST_PUSHED: ((), torch.float64),
        }
        for name, column in columns.items():
            shapes[STATE + name] = ((dim,) if column.is_per_element else (), wide)
        self._columns = {
            name: GrowingTensor(FIRST_CAPACITY, shape, each)
            for name, (shape, each) in shapes.items()
        }
        self.images = OpenImages[RowImage]()
        self._top = 0
        self._free: Rows = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of allocated memory, with the index."""
        return self._index.num_bytes + self._capacity * self._column_bytes

    @property
    def row_bytes(self) -> int:
        """Upper bound on a row's bytes, with its part of the index."""
        return self._column_bytes + INDEX_BYTES_PER_ROW

    @property
    def _column_bytes(self) -> int:
        return sum(column.row_bytes for column in self._columns.values())

    @property
    def num_spare(self) -> int:
        """Number of allocated rows not in use."""
        return self._capacity - len(self)

    def moved_bytes(self, num_more: int) -> int:
        """Return how many bytes are moved to add `num_more` rows."""
        return self._index.num_bytes if self._index.moves_for(num_more) else 0

    def growth_bytes(self, num_rows: int) -> int:
        """Return the most bytes of growth to hold `num_rows` rows in all."""
        return max(0, self._capacity_for(num_rows) - self._capacity) * self.row_bytes

    def limit(self, max_rows: int) -> None:
        """Allocate no spare capacity beyond `max_rows`."""
        self._max_rows = max_rows

    @property
    def state_names(self) -> list[str]:
        return list(self._fills)

    def find(self, ids: Ids) -> Rows:
        """Return the row of each id, -1 for ids without one."""
        return self._index.find(ids)

    def births(self, rows: Rows) -> Ids:
        """Return the version that made each row; 0 for row -1."""
        births = self._numbers(BIRTHS)[rows]
        return np.where(rows >= 0, births, 0)

    def add(self, ids: Ids, values: Tensor, *, birth: int) -> Rows:
        """Make a row for each of these ids, which have none; return the rows in the ids' order."""
        reused = self._free[len(self._free) - min(len(ids), len(self._free)) :]
        num_fresh = len(ids) - len(reused)
        self._reserve(self._top + num_fresh)
        self._index.reserve(self._top + num_fresh, len(ids))
        self._free = self._free[: len(self._free) - len(reused)]
        rows = np.concatenate([reused, np.arange(self._top, self._top + num_fresh)])
        self._top += num_fresh
        self._save(reused)
        self._index.insert(ids, rows)
        at = torch.from_numpy(rows)
        self._columns[VALUES].tensor.index_copy_(0, at, values)
        self._columns[BIRTHS].tensor.index_fill_(0, at, birth)
        for name, fill in self._fills.items():
            self._columns[STATE + name].tensor.index_fill_(0, at, fill)
        return rows

    def remove(self, rows: Rows) -> None:
        self._save(rows)
        self._index.remove(rows)
        self._numbers(BIRTHS)[rows] = 0
        self._free = np.concatenate([self._free, rows])

    def touch(self, rows: Rows, at_unix_s: float) -> None:
        """Note that the rows were pushed at `at_unix_s`."""
        self._save(rows)
        self._numbers(LAST_PUSHED)[rows] = at_unix_s

    def idle_since(self, before_unix_s: float) -> Rows:
        """Return all rows last pushed before `before_unix_s`."""
        last_pushed = self._numbers(LAST_PUSHED)[: self._top]
        is_live = self._numbers(BIRTHS)[: self._top] > 0
        return np.flatnonzero(is_live & (last_pushed < before_unix_s))

    def oldest(self, count: int, spared: Rows) -> Rows:
        """Return the `count` rows that were pushed longest ago, except the rows in `spared`. Ids
        decide among rows of one time, since positions differ between replicas."""
        is_live = self._numbers(BIRTHS)[: self._top] > 0
        is_live[spared] = False
        rows = np.flatnonzero(is_live)
        if count >= len(rows):
            return rows
        last_pushed = self._numbers(LAST_PUSHED)[rows]
        limit_s = np.partition(last_pushed, count - 1)[count - 1]
        older = rows[last_pushed < limit_s]
        alike = rows[last_pushed == limit_s]
        alike = alike[np.argsort(self._index.ids[alike], kind="stable")]
        return np.concatenate([older, alike[: count - len(older)]])

    def values(self, rows: Rows) -> Tensor:
        """Copy the values of rows; all of them must exist."""
        return self._columns[VALUES].tensor.index_select(0, torch.from_numpy(rows))

    def state(self, name: str, rows: Rows) -> Tensor:
        return self._columns[STATE + name].tensor.index_select(0, torch.from_numpy(rows))

    def write_rows(self, rows: Rows, values: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write values and state of distinct rows."""
        self._save(rows)
        at = torch.from_numpy(rows)
        self._columns[VALUES].tensor.index_copy_(0, at, values.to(self._columns[VALUES].dtype))
        for name, tensor in state.items():
            self._columns[STATE + name].tensor.index_copy_(0, at, tensor)

    @property
    def columns(self) -> Mapping[str, Tensor]:
        """Columns by name, and the ids, not copied. The store cannot grow in place while they
        exist."""
        top = self._top
        columns = {name: column.tensor[:top] for name, column in self._columns.items()}
        return {IDS: self._index.id_tensor[:top]} | columns

    def image(self) -> RowImage:
        """Return an image of the rows as of now; close it after use."""
        image = RowImage(self, self._top, len(self))
        self.images.add(image)
        return image

    def _save(self, rows: Rows) -> None:
        for image in self.images():
            image.save(rows)

    def has_memory_for(self, num_more: int) -> bool:
        """True if `reserve` would allocate nothing for that many more rows."""
        num_rows = min(len(self) + num_more, self._max_rows)
        return num_rows <= self._capacity and self._index.has_memory_for(num_rows, num_more)

    def reserve(self, num_rows: int, num_more: int) -> None:
        """Allocate memory for `num_rows` rows, `num_more` of which `add` or `fill` will add. Raises
        OSError or MemoryError if there is none; all rows are then as before."""
        self._reserve(num_rows)
        self._index.reserve(num_rows, num_more)

    def fill(self, rows: slice, columns: Mapping[str, Tensor]) -> None:
        """Add the next rows, at the positions that they had in another store. Positions with birth
        0 are free."""
        for name, column in self._columns.items():
            column.tensor[rows] = columns[name]
        filled = np.arange(rows.start, rows.stop)
        # Received data may be unaligned: numpy gets a copy.
        is_live = self._numbers(BIRTHS)[rows] > 0
        self._index.insert(columns[IDS].clone().numpy()[is_live], filled[is_live])
        self._free = np.concatenate([self._free, filled[~is_live]])
        self._top = rows.stop

    def ids_from(self, start: int, max_rows: int) -> tuple[Ids, int]:
        """Return the ids of the rows in use among the `max_rows` positions from `start` on; and the
        position to continue from, which is `start` at the end."""
        stop = min(start + max_rows, self._top)
        if stop <= start:
            return np.zeros(0, np.int64), start
        is_live = self._numbers(BIRTHS)[start:stop] > 0
        return self._index.ids[start:stop][is_live], stop

    def columns_of(self, ids: Ids) -> tuple[Ids, list[Tensor]]:
        """Return the births of these ids' rows, 0 for a missing row; and copies of all columns of
        the existing rows."""
        rows = self.find(ids)
        at = torch.from_numpy(rows[rows >= 0])
        columns = [self._columns[name].tensor.index_select(0, at) for name in sorted(self._columns)]
        return self.births(rows), columns

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of an image into an empty store. Raises InternalError for other
        columns."""
        ids = tensors[IDS].numpy() if IDS in tensors else np.zeros(0, np.int64)
        seen = {name: (t.shape, t.dtype) for name, t in tensors.items() if name in self._columns}
        expected = {
            name: (torch.Size([len(ids), *c.row_shape]), c.dtype)
            for name, c in self._columns.items()
        }
        if seen != expected or IDS not in tensors:
            raise InternalError(
                "an image does not have the columns of its table",
                seen=str(seen)[:200],
                expected=str(expected)[:200],
            )
        self.reserve(len(ids), len(ids))
        if len(ids):
            self.fill(slice(0, len(ids)), tensors)

    def _numbers(self, name: str) -> NDArray[np.int64]:
        numbers: NDArray[np.int64] = self._columns[name].tensor.numpy()
        return numbers

    @property
    def _capacity(self) -> int:
        """Number of rows for which all columns have memory: one may have grown before another
        could not."""
        return min(map(len, self._columns.values()))

    def _capacity_for(self, top: int) -> int:
        capacity = self._capacity
        if top <= capacity:
            return capacity
        is_large = capacity * self._column_bytes >= DOUBLED_BYTES
        more = capacity // 4 if is_large else capacity
        return max(top, min(capacity + more, self._max_rows))

    def _reserve(self, top: int) -> None:
        capacity = self._capacity_for(top)
        if capacity == self._capacity:
            return
        for column in self._columns.values():
            if len(column) < capacity:
                column.grow(capacity)
