"""`shoal_proto.row_hash` over arrays."""

import numpy as np
from numpy.typing import NDArray

from shoal_proto.row_hash import FIRST_FACTOR, GAMMA, SECOND_FACTOR

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

_GAMMA = np.uint64(GAMMA)
_FIRST_FACTOR = np.uint64(FIRST_FACTOR)
_SECOND_FACTOR = np.uint64(SECOND_FACTOR)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)


def mix64(values: Words) -> Words:
    """Hash each value to 64 bits."""
    mixed = values + _GAMMA
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _FIRST_FACTOR
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _SECOND_FACTOR
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def hash_ids(ids: Ids) -> Words:
    """Hash row ids. The high half of a hash chooses the shard, its low bits a slot in the index."""
    return mix64(ids.view(np.uint64))


def shards_of(ids: Ids, num_shards: int) -> Ids:
    """Return the index of each row's virtual shard in the table."""
    shards = ((hash_ids(ids) >> _HALF) * np.uint64(num_shards)) >> _HALF
    return shards.view(np.int64)
