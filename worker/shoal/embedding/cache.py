"""A worker's cache of recently looked up rows.

An id's hash decides its only slot, so that operations are a few passes over arrays.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.embedding.routing import Ids, hash_ids

NEVER = -(2**62)


@dataclass(frozen=True)
class CachedRows:
    """Values of rows, and their versions. Each field has one entry for each row."""

    values: Tensor
    births: Ids
    """Version that created each row; 0: initial values."""
    versions: Ids
    """Version of the shard at the lookup."""
    epochs: Ids


class HotRows:
    """Cache of `capacity` rows, rounded up to a power of two, at least 2."""

    def __init__(self, capacity: int, dim: int, dtype: torch.dtype) -> None:
        size = 1 << max(capacity - 1, 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._ids: Ids = np.zeros(size, np.int64)
        self._steps: Ids = np.full(size, NEVER, np.int64)
        self._births: Ids = np.zeros(size, np.int64)
        self._versions: Ids = np.zeros(size, np.int64)
        self._epochs: Ids = np.zeros(size, np.int64)
        self._values = torch.zeros((size, dim), dtype=dtype)

    def find(self, ids: Ids, oldest_step: int, oldest_versions: Ids, epochs: Ids) -> Ids:
        """Return each row's slot; -1 unless the row was looked up at `oldest_step`,
        `oldest_versions` and `epochs` or later. Rows of an earlier epoch may be of training that
        was undone."""
        slots = self._slots(ids)
        is_fresh = (
            (self._ids[slots] == ids)
            & (self._steps[slots] >= oldest_step)
            & (self._versions[slots] >= oldest_versions)
            & (self._epochs[slots] >= epochs)
        )
        return np.where(is_fresh, slots, -1)

    def take(self, slots: Ids) -> CachedRows:
        """Return copies of these slots."""
        return CachedRows(
            values=self._values.index_select(0, torch.from_numpy(slots)),
            births=self._births[slots],
            versions=self._versions[slots],
            epochs=self._epochs[slots],
        )

    def store_rows(self, ids: Ids, held: CachedRows, step: int) -> None:
        """Store rows that were looked up at this step."""
        slots = self._slots(ids)
        self._ids[slots] = ids
        # Of several rows with one slot, the last one is stored.
        stored = np.flatnonzero(self._ids[slots] == ids)
        values = held.values
        if len(stored) < len(ids):
            slots = slots[stored]
            values = values.index_select(0, torch.from_numpy(stored))
        self._steps[slots] = step
        self._births[slots] = held.births[stored]
        self._versions[slots] = held.versions[stored]
        self._epochs[slots] = held.epochs[stored]
        self._values.index_copy_(0, torch.from_numpy(slots), values)

    def clear(self) -> None:
        self._steps.fill(NEVER)

    def _slots(self, ids: Ids) -> Ids:
        return (hash_ids(ids) & self._mask).view(np.int64)
