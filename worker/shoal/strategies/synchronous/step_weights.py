"""Losses that are means over something else than samples: tokens, say."""

import math
from collections.abc import Sequence

from shoal.backends.shared_memory.words import bits_of, number_of

_BY_SAMPLES = -1.0
"""What is said of a step whose losses are means over samples, and weigh by these."""
BY_SAMPLES = bits_of(_BY_SAMPLES)
"""The same as a word."""


class StepWeights:
    """What one member's losses in a step weigh, and what those of all members come to.

    How much all of a step weighs is known when its last pass was made. So gradients are summed up
    as they weigh, and divided by the sum behind the last of them.
    """

    def __init__(self) -> None:
        self.unit = 1.0
        """Losses are multiplied by weight / unit: about what a member's step weighed last, so that
        gradients stay as large as they are without weights. A power of two: nothing is rounded by
        it. The same on all members, from one step to the next in a generation."""
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._own = _BY_SAMPLES

    @property
    def are_own(self) -> bool:
        """Whether this member's losses weigh by something else than samples."""
        return self._own != _BY_SAMPLES

    def add(self, weight: float) -> None:
        """One more loss, which weighs so much."""
        self._own = max(self._own, 0.0) + weight

    def word(self) -> int:
        """What this member says, as an integer: other members' zeros may be added to it."""
        return BY_SAMPLES if self._own == _BY_SAMPLES else bits_of(self._own)

    def said(self, words: Sequence[int]) -> list[float | None]:
        """What each member's losses weigh; None where they weigh by samples."""
        weights = [number_of(word) for word in words]
        return [None if weight == _BY_SAMPLES else weight for weight in weights]

    def factor(self, weights: Sequence[float]) -> float:
        """By what the mean over the members of their gradients is to be multiplied, where those of
        each are sums over its losses. Members that share samples all say what these weigh."""
        mean = math.fsum(weights) / len(weights)
        unit, self.unit = self.unit, 2.0 ** math.floor(math.log2(mean))
        return unit / mean
