"""Grouping of ids for messages: each id once, ordered by virtual shard.

A table has `num_shards` virtual shards. The hash of an id decides its shard.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal_proto.row_hash import FIRST_FACTOR, GAMMA, SECOND_FACTOR

Ids = NDArray[np.int64]

_HALF = np.uint64(32)


@dataclass(frozen=True)
class RoutedIds:
    """Distinct ids, ordered by shard, and ascending within each."""

    ids: Ids
    shards: Ids

    def spans(self) -> list[tuple[int, int, int]]:
        """Return (shard, start, stop) of each shard that has ids: `ids[start:stop]`."""
        if not len(self.ids):
            return []
        starts = np.flatnonzero(np.diff(self.shards, prepend=self.shards[0] - 1))
        stops = np.append(starts[1:], len(self.ids))
        shards = self.shards[starts]
        return list(zip(shards.tolist(), starts.tolist(), stops.tolist(), strict=True))

    def only(self, chosen: NDArray[np.bool_]) -> "RoutedIds":
        return RoutedIds(self.ids[chosen], self.shards[chosen])


def hash_ids(ids: Ids) -> NDArray[np.uint64]:
    """Compute `shoal_proto.row_hash.mix64` of each id."""
    mixed = ids.view(np.uint64) + np.uint64(GAMMA)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(FIRST_FACTOR)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(SECOND_FACTOR)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def route(ids: Ids, num_shards: int) -> tuple[RoutedIds, Ids]:
    """Return the distinct ids, and the index of each given id among them."""
    distinct, positions = np.unique(ids, return_inverse=True)
    hashed = hash_ids(distinct)
    shards = (((hashed >> _HALF) * np.uint64(num_shards)) >> _HALF).view(np.int64)
    order = np.argsort(shards, kind="stable")
    position_of = np.empty(len(order), np.int64)
    position_of[order] = np.arange(len(order))
    return RoutedIds(distinct[order], shards[order]), position_of[positions]
