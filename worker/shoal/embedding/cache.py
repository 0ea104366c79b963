"""A worker's cache of rows that were looked up lately, as long as they may be used again.

One slot for each hash, so that every operation is a few passes over arrays: rows that are needed
often return soon after another one has replaced them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.embedding.routing import Ids, hash_ids

NEVER = -(2**62)


@dataclass(frozen=True)
class CachedRows:
    """Rows with their origin. One entry for each row."""

    values: Tensor
    births: Ids
    """The version that created each row; 0: the row has its initial values."""
    versions: Ids
    """Version of the shard when the row was looked up."""
    epochs: Ids


class HotRows:
    """Cache of at most `capacity` rows, rounded up to a power of two."""

    def __init__(self, capacity: int, dim: int, dtype: torch.dtype) -> None:
        size = 1 << max(capacity - 1, 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._ids: Ids = np.zeros(size, np.int64)
        self._steps: Ids = np.full(size, NEVER, np.int64)
        self._births: Ids = np.zeros(size, np.int64)
        self._versions: Ids = np.zeros(size, np.int64)
        self._epochs: Ids = np.zeros(size, np.int64)
        self._values = torch.zeros((size, dim), dtype=dtype)

    def find(self, ids: Ids, oldest_step: int, oldest_versions: Ids) -> Ids:
        """The slot of each row that is cached and was looked up at that step and version or later;
        -1 for the others."""
        places = self._places(ids)
        is_fresh = (
            (self._ids[places] == ids)
            & (self._steps[places] >= oldest_step)
            & (self._versions[places] >= oldest_versions)
        )
        return np.where(is_fresh, places, -1)

    def take(self, places: Ids) -> CachedRows:
        """Copies of the rows in these slots."""
        return CachedRows(
            values=self._values.index_select(0, torch.from_numpy(places)),
            births=self._births[places],
            versions=self._versions[places],
            epochs=self._epochs[places],
        )

    def put(self, ids: Ids, held: CachedRows, step: int) -> None:
        """Keep rows that were looked up at this step. Of two rows with one slot, one is kept."""
        places = self._places(ids)
        self._ids[places] = ids
        # Of rows with one slot the last write counts; the others must write nothing.
        won = np.flatnonzero(self._ids[places] == ids)
        places = places[won]
        self._steps[places] = step
        self._births[places] = held.births[won]
        self._versions[places] = held.versions[won]
        self._epochs[places] = held.epochs[won]
        self._values[torch.from_numpy(places)] = held.values[torch.from_numpy(won)]

    def _places(self, ids: Ids) -> Ids:
        return (hash_ids(ids) & self._mask).view(np.int64)
