"""Tensors that grow without a copy of their data: only page tables are changed (mremap)."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

FREED_AT_A_TIME_BYTES = 8 * 1024 * 1024
"""Part of the memory that is freed at a time: the GIL is held meanwhile."""


class GrowingTensor:
    """A tensor whose first dimension grows. Added rows are zero, and take no memory at first. If a
    view of `tensor` is alive when it grows, all data are copied."""

    def __init__(self, num_rows: int, row_shape: Sequence[int], dtype: torch.dtype) -> None:
        self.row_shape = tuple(row_shape)
        self.dtype = dtype
        self.row_bytes = math.prod(row_shape) * dtype.itemsize
        self._memory = _reserved(num_rows * self.row_bytes)
        self.tensor = self._view(num_rows)

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def grow(self, num_rows: int) -> None:
        """Grow to `num_rows`, which must be more than before. Raises OSError, without a
        change, if there is no memory."""
        before = self.tensor
        num_bytes = max(num_rows * self.row_bytes, 1)
        # The mapping cannot move while a view of it exists.
        self.tensor = before.new_empty(0)
        num_before = before.shape[0]
        del before
        try:
            self._memory.resize(num_bytes)
        except (BufferError, SystemError, OSError):
            # A view exists, or this system cannot move memory.
            try:
                new = _reserved(num_bytes)
            except OSError:
                self.tensor = self._view(num_before)
                raise
            old, self._memory = self._memory, new
            self.tensor = self._view(num_rows)
            held = torch.frombuffer(old, dtype=self.dtype, count=num_before * self._row_numel)
            self.tensor[:num_before] = held.view(num_before, *self.row_shape)
            return
        self.tensor = self._view(num_rows)

    def free(self) -> None:
        """Free the memory in small parts. Do not use the tensor afterwards: it reads zeros."""
        for at in range(0, len(self._memory), FREED_AT_A_TIME_BYTES):
            length = min(FREED_AT_A_TIME_BYTES, len(self._memory) - at)
            self._memory.madvise(mmap.MADV_DONTNEED, at, length)

    @property
    def _row_numel(self) -> int:
        return math.prod(self.row_shape)

    def _view(self, num_rows: int) -> Tensor:
        count = num_rows * self._row_numel
        if not count:
            return torch.empty((num_rows, *self.row_shape), dtype=self.dtype)
        flat = torch.frombuffer(self._memory, dtype=self.dtype, count=count)
        return flat.view(num_rows, *self.row_shape)


def _reserved(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
