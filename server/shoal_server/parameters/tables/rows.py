"""The rows of one shard: which ids have one, and the numbers that each row consists of."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal_proto.errors import InternalError
from shoal_server.parameters.tables.hashing import Ids
from shoal_server.parameters.tables.index import MAX_ROWS, RowIndex, Rows
from shoal_server.parameters.tables.optimizers import StateColumn

VALUES = "values"
BIRTHS = "births"
LAST_PUSHED = "last_pushed_unix_s"
IDS = "ids"
STATE = "optimizer/"
"""In an image, before the names of the optimizer's columns."""
FIRST_CAPACITY = 64
INDEX_BYTES_PER_ROW = 32
"""At worst nearly four slots of four bytes, and two ids."""


class RowStore:
    """Grows by doubling; rows that were taken out are used again first."""

    def __init__(self, dim: int, dtype: torch.dtype, columns: Mapping[str, StateColumn]) -> None:
        self._max_rows = MAX_ROWS
        self._index = RowIndex()
        self._fills = {name: column.fill for name, column in columns.items()}
        # Steps and averages of a 16-bit table would stand still in 16 bits.
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        self._columns: dict[str, Tensor] = {
            VALUES: torch.zeros((FIRST_CAPACITY, dim), dtype=dtype),
            BIRTHS: torch.zeros(FIRST_CAPACITY, dtype=torch.int64),
            LAST_PUSHED: torch.zeros(FIRST_CAPACITY, dtype=torch.float64),
        }
        for name, column in columns.items():
            shape = (FIRST_CAPACITY, dim) if column.is_per_element else (FIRST_CAPACITY,)
            self._columns[STATE + name] = torch.zeros(shape, dtype=wide)
        self._top = 0
        self._free: Rows = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory taken, the index included."""
        return self._index.num_bytes + sum(c.nbytes for c in self._columns.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of memory that one row takes at worst, but for the room left to grow."""
        per_row = sum(c.nbytes // c.shape[0] for c in self._columns.values())
        return per_row + INDEX_BYTES_PER_ROW

    @property
    def num_spare(self) -> int:
        """Rows that there is memory for, and that are not in use."""
        return self._capacity - len(self)

    def moves_for(self, num_more: int) -> bool:
        """Whether all may have to be moved to make room for so many more rows."""
        return num_more > self.num_spare or self._index.moves_for(num_more)

    def growth_bytes(self, num_rows: int) -> int:
        """By how much memory grows, at worst, for so many rows altogether."""
        return max(0, self._capacity_for(num_rows) - self._capacity) * self.row_bytes

    def limit(self, max_rows: int) -> None:
        """No memory is taken for more rows than these, unless more are added."""
        self._max_rows = max_rows

    @property
    def state_names(self) -> list[str]:
        return list(self._fills)

    def find(self, ids: Ids) -> Rows:
        """The row of each id, -1 for those that have none."""
        return self._index.find(ids)

    def births(self, rows: Rows) -> Ids:
        """The version that made each row; 0 where there is none."""
        births = self._numbers(BIRTHS)[rows]
        return np.where(rows >= 0, births, 0)

    def add(self, ids: Ids, values: Tensor, *, birth: int) -> Rows:
        """Make a row for each id, none of which has one; in the order of the ids."""
        reused = self._free[len(self._free) - min(len(ids), len(self._free)) :]
        self._free = self._free[: len(self._free) - len(reused)]
        num_fresh = len(ids) - len(reused)
        self._reserve(self._top + num_fresh)
        rows = np.concatenate([reused, np.arange(self._top, self._top + num_fresh)])
        self._top += num_fresh
        self._index.insert(ids, rows)
        at = torch.from_numpy(rows)
        self._columns[VALUES][at] = values
        self._columns[BIRTHS][at] = birth
        for name, fill in self._fills.items():
            self._columns[STATE + name][at] = fill
        return rows

    def remove(self, rows: Rows) -> None:
        self._index.remove(rows)
        self._numbers(BIRTHS)[rows] = 0
        self._free = np.concatenate([self._free, rows])

    def touch(self, rows: Rows, at_unix_s: float) -> None:
        """The rows were pushed at that time."""
        self._numbers(LAST_PUSHED)[rows] = at_unix_s

    def idle_since(self, before_unix_s: float) -> Rows:
        """All rows that were last pushed before that time."""
        last_pushed = self._numbers(LAST_PUSHED)[: self._top]
        is_live = self._numbers(BIRTHS)[: self._top] > 0
        return np.flatnonzero(is_live & (last_pushed < before_unix_s))

    def oldest(self, count: int, spared: Rows) -> Rows:
        """The rows that were pushed longest ago, `count` of them or all there are, but not those
        spared. Of rows pushed at the same time those of lower ids come first: where a row lies
        must not matter, for it lies elsewhere in a copy."""
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
        """A copy of the values of rows, all of which exist."""
        return self._columns[VALUES].index_select(0, torch.from_numpy(rows))

    def state(self, name: str, rows: Rows) -> Tensor:
        """A copy of one column of optimizer state."""
        return self._columns[STATE + name].index_select(0, torch.from_numpy(rows))

    def put(self, rows: Rows, values: Tensor, state: Mapping[str, Tensor]) -> None:
        """Write values and state of rows, each named once."""
        at = torch.from_numpy(rows)
        self._columns[VALUES][at] = values.to(self._columns[VALUES].dtype)
        for name, tensor in state.items():
            self._columns[STATE + name][at] = tensor

    def tensors(self) -> dict[str, Tensor]:
        """A copy of all rows, in the order of their ids; two stores with the same rows give the
        same."""
        rows = np.flatnonzero(self._numbers(BIRTHS)[: self._top] > 0)
        rows = rows[np.argsort(self._index.ids[rows], kind="stable")]
        at = torch.from_numpy(rows)
        copied = {name: column.index_select(0, at) for name, column in self._columns.items()}
        return {IDS: torch.from_numpy(self._index.ids[rows])} | copied

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the rows that `tensors` gave, into an empty store. Raises InternalError if they are
        not those of such a store."""
        ids = tensors[IDS].numpy() if IDS in tensors else np.zeros(0, np.int64)
        seen = {name: (t.shape, t.dtype) for name, t in tensors.items() if name in self._columns}
        expected = {
            name: (torch.Size([len(ids), *c.shape[1:]]), c.dtype)
            for name, c in self._columns.items()
        }
        if seen != expected or IDS not in tensors:
            raise InternalError(
                "an image does not have the columns of its table",
                seen=str(seen)[:200],
                expected=str(expected)[:200],
            )
        self._reserve(len(ids))
        rows = np.arange(len(ids))
        self._index.insert(ids, rows)
        for name, column in self._columns.items():
            column[: len(ids)] = tensors[name]
        self._top = len(ids)

    def _numbers(self, name: str) -> NDArray[np.int64]:
        numbers: NDArray[np.int64] = self._columns[name].numpy()
        return numbers

    @property
    def _capacity(self) -> int:
        return int(self._columns[BIRTHS].shape[0])

    def _capacity_for(self, top: int) -> int:
        if top <= self._capacity:
            return self._capacity
        return max(top, min(2 * self._capacity, self._max_rows))

    def _reserve(self, top: int) -> None:
        capacity = self._capacity_for(top)
        if capacity == self._capacity:
            return
        for name, column in self._columns.items():
            grown = column.new_zeros((capacity, *column.shape[1:]))
            grown[: column.shape[0]] = column
            self._columns[name] = grown
