"""Permutation of n numbers, computed on demand.

A Feistel network with keyed rounds permutes all numbers of as many bits as n - 1. An output of n or
above is permuted again (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
domains").
"""

from torch import Tensor

from shoal.randomness import mix

ROUNDS = 8
"""Number of rounds. Four pseudorandom ones are enough (Luby and Rackoff 1988), but the functions
here are simpler."""
_MULTIPLIERS = (0x5851F42D4C957F2D, 0x14057B7EF767814F)


class KeyedPermutation:
    """Permutation of range(size) for a key, the same on every machine."""

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        self._keys = [mix(key, number) for number in range(ROUNDS)]

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the numbers at these positions (int64, below size)."""
        numbers = self._once(positions)
        beyond = (numbers >= self.size).nonzero().flatten()
        while len(beyond):
            again = self._once(numbers[beyond])
            numbers[beyond] = again
            beyond = beyond[again >= self.size]
        return numbers

    def _once(self, numbers: Tensor) -> Tensor:
        low_mask, high_mask = (1 << self._low_bits) - 1, (1 << self._high_bits) - 1
        low, high = numbers & low_mask, numbers >> self._low_bits
        # Each round changes one half by a function of the other, and so is invertible.
        for number, key in enumerate(self._keys):
            if number % 2:
                low = low ^ (_scrambled(high, key) & low_mask)
            else:
                high = high ^ (_scrambled(low, key) & high_mask)
        return (high << self._low_bits) | low


def _scrambled(half: Tensor, key: int) -> Tensor:
    mixed = (half ^ key) * _MULTIPLIERS[0]
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _MULTIPLIERS[1]
    return (mixed >> 33) & 0x7FFFFFFF
