"""Time limits that stand still while nobody could keep them."""

import math
from collections.abc import Sequence


class HeldClock:
    """Since when the time of a wait for others runs.

    It stands still while a member is paused, as the coordinator says, and while no coordinator is
    there to say anything.
    """

    def __init__(self) -> None:
        self.away = True
        """Whether no coordinator holds this member's stream."""
        self._turned_s = -math.inf
        self._paused: Sequence[str] = ()
        """Whom the others wait for."""
        self._released_s = -math.inf

    def turn(self, now_s: float, *, away: bool) -> None:
        """The stream has ended, or its first notice came."""
        self.away, self._turned_s = away, now_s

    def pause(self, member_ids: Sequence[str], now_s: float) -> None:
        """These are paused now, and nobody else."""
        self._paused, self._released_s = tuple(member_ids), now_s

    def paused_until_s(self, now_s: float) -> float:
        """Up to when somebody was paused."""
        return now_s if self._paused else self._released_s

    def held_until_s(self, now_s: float) -> float:
        """Up to when the time stood still."""
        return now_s if self.away else self.paused_until_s(now_s)

    def give_up_s(self, since_s: float, limit_s: float, now_s: float) -> float:
        """When a wait for the coordinator's word is over, as far as is known."""
        if self.away:
            return math.inf
        return max(since_s, self._turned_s, self.paused_until_s(now_s)) + limit_s
