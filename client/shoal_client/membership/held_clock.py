"""Time limits that stand still while nobody could keep them."""

import math
from collections.abc import Sequence

from shoal_client.membership.member_events import Over, WaitUntil


class HeldClock:
    """Since when the time of a wait for others runs.

    It stands still while a member is paused, as the coordinator says, while no coordinator is there
    to say anything, and while this member stands by: it may for as long as the job goes on.
    """

    def __init__(self) -> None:
        self.away = True
        """Whether no coordinator holds this member's stream."""
        self.give_up_at_s = math.inf
        """When the trainer's own calls and waits end, whatever held them up."""
        self.away_since_s = math.inf
        """Since when none does, if one ever did."""
        self._turned_s = -math.inf
        self._paused: Sequence[str] = ()
        """Whom the others wait for."""
        self._released_s = -math.inf
        self._stands_by = False
        self._stood_by_s = -math.inf

    def turn(self, now_s: float, *, away: bool) -> None:
        """The stream has ended, or its first notice came."""
        self.away_since_s = min(self.away_since_s, now_s) if away else math.inf
        self.away, self._turned_s = away, now_s

    def away_s(self, now_s: float) -> float:
        """Seconds since a coordinator last held this member's stream; 0 while one does."""
        return max(0.0, now_s - self.away_since_s)

    def pause(self, member_ids: Sequence[str], now_s: float) -> None:
        """These are paused now, and nobody else."""
        self._paused, self._released_s = tuple(member_ids), now_s

    def stand_by(self, now_s: float, *, stands_by: bool) -> None:
        """Whether this member is one for whom the job has no place now."""
        if stands_by or self._stands_by:
            self._stood_by_s = now_s
        self._stands_by = stands_by

    def paused_until_s(self, now_s: float) -> float:
        """Up to when somebody was paused."""
        return now_s if self._paused else self._released_s

    def held_until_s(self, now_s: float) -> float:
        """Up to when the time stood still."""
        return now_s if self.away else self.paused_until_s(now_s)

    def give_up_s(self, since_s: float, limit_s: float, now_s: float) -> float:
        """When a wait for the coordinator's word is over, as far as is known."""
        if self.away or self._stands_by:
            return math.inf
        held_s = max(self._turned_s, self._stood_by_s, self.paused_until_s(now_s))
        return max(since_s, held_s) + limit_s

    def work_done(
        self, give_up_s: float, away_limit_s: float, now_s: float, *, is_over: bool
    ) -> Over | WaitUntil:
        """Whether nobody needs a member any more that has done its work.

        False after `give_up_s`, or if no coordinator was there for `away_limit_s`.
        """
        until_s = min(give_up_s, self.away_since_s + away_limit_s)
        done = is_over or now_s >= until_s
        return Over(over=is_over) if done else WaitUntil(until_s=until_s)
