"""Pauses between attempts: one policy for servers and clients."""

FIRST_S = 0.02
LONGEST_S = 1.0
PROMPT_S = 3.0
"""Usual length of a leader failover. Until the pauses of a caller add up to this, each is at most
PROMPT_LONGEST_S (unless the caller has set `first_s`)."""
PROMPT_LONGEST_S = 0.2


_MOST_DOUBLINGS = 64


def doubled_s(first_s: float, longest_s: float, num_before: int) -> float:
    """Return the pause after `num_before` earlier ones: `first_s`, doubled each time, at most
    `longest_s`."""
    return min(first_s * 2.0 ** min(num_before, _MOST_DOUBLINGS), longest_s)


class BackOff:
    """Pauses of one caller, doubled from `first_s` up to `longest_s`. The defaults stay short for
    as long as a leader failover takes.
    """

    def __init__(self, first_s: float | None = None, longest_s: float | None = None) -> None:
        """Given `first_s` and no `longest_s`, all pauses are equal, apart from the random part."""
        self._first_s = FIRST_S if first_s is None else first_s
        self._prompt_s = PROMPT_S if first_s is None else 0.0
        if longest_s is None:
            longest_s = LONGEST_S if first_s is None else first_s
        self._longest_s = longest_s
        self.reset()

    def reset(self) -> None:
        """Start again with the first pause."""
        self._next_s, self._waited_s = self._first_s, 0.0

    def pause_s(self, chance: float = 1.0) -> float:
        """Return the seconds to wait now. `chance`: random, from 0 to 1; half of the pause depends
        on it, so that the members of a large job do not retry at the same time.
        """
        longest_s = PROMPT_LONGEST_S if self._waited_s < self._prompt_s else self._longest_s
        pause_s = min(self._next_s, longest_s) * (0.5 + 0.5 * chance)
        self._next_s = min(2 * self._next_s, longest_s)
        self._waited_s += pause_s
        return pause_s
