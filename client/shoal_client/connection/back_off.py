"""How long a client waits between its attempts to find who leads."""

FIRST_BACK_OFF_S = 0.02
MAX_BACK_OFF_S = 1.0
PROMPT_S = 3.0
"""A fail-over takes less as a rule: for so long nobody waits longer than PROMPT_BACK_OFF_S."""
PROMPT_BACK_OFF_S = 0.2


class BackOff:
    """The pauses of one caller between its attempts: short at first, as a new leader is near."""

    def __init__(self) -> None:
        self._next_s = FIRST_BACK_OFF_S
        self._waited_s = 0.0

    def reset(self) -> None:
        """An attempt succeeded: the next failure is a new one."""
        self._next_s, self._waited_s = FIRST_BACK_OFF_S, 0.0

    def pause_s(self, chance: float) -> float:
        """Seconds to wait now. `chance`: a random number from 0 to 1.

        Half of each pause is random, so that the members of a large job do not come in step.
        """
        longest_s = PROMPT_BACK_OFF_S if self._waited_s < PROMPT_S else MAX_BACK_OFF_S
        pause_s = min(self._next_s, longest_s) * (0.5 + 0.5 * chance)
        self._next_s = min(2 * self._next_s, longest_s)
        self._waited_s += pause_s
        return pause_s
