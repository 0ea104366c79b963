"""Fixed hash of a row's id, which determines the row's shard.

The finaliser of SplitMix64 (Steele, Lea, Flood 2014) after one step of its counter. Servers and
workers compute the same over arrays; tests compare them with this module.
"""

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """Return 64 bits that depend on every bit of the value; a bijection of 64-bit words."""
    mixed = (value + GAMMA) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * FIRST_FACTOR) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * SECOND_FACTOR) & MASK
    return mixed ^ (mixed >> 31)


def shard_of(row_id: int, num_shards: int) -> int:
    """Return the index of the table's shard that has the row; ids are signed 64-bit integers."""
    return ((mix64(row_id & MASK) >> 32) * num_shards) >> 32
