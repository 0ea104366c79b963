"""Time limits of a member's waits for others."""

import math
from collections.abc import Sequence

from shoal_client.membership.member_events import GenerationOver, WaitUntil


class WaitClock:
    """Clock of waits for other members. It stops while a member is paused, no coordinator is
    reached, or this member is on standby. After a stop, each limit begins anew.
    """

    def __init__(self) -> None:
        self.away = True
        """True if this member has no open stream from a coordinator."""
        self.give_up_at_s = math.inf
        """End of the trainer's calls and waits in any case."""
        self.away_since_s = math.inf
        """End of the last stream; infinite while a stream is open, and before the first."""
        self._turned_s = -math.inf
        self._paused: Sequence[str] = ()
        self._released_s = -math.inf
        self._is_standby = False
        self._stood_by_s = -math.inf
        """Newest time at which this member was known to be on standby."""

    def set_away(self, now_s: float, *, away: bool) -> None:
        """Record that the stream has ended (`away`), or its first notice."""
        self.away_since_s = min(self.away_since_s, now_s) if away else math.inf
        self.away, self._turned_s = away, now_s

    def away_s(self, now_s: float) -> float:
        """Seconds since the last stream ended; 0 while one is open."""
        return max(0.0, now_s - self.away_since_s)

    def pause(self, member_ids: Sequence[str], now_s: float) -> None:
        """Set the paused members. Limits begin anew in any case: the coordinator also sends this
        notice while a bring-up makes progress."""
        self._paused, self._released_s = tuple(member_ids), now_s

    def set_standby(self, now_s: float, *, is_standby: bool) -> None:
        """Set whether this member is on standby."""
        if is_standby or self._is_standby:
            self._stood_by_s = now_s
        self._is_standby = is_standby

    def paused_until_s(self, now_s: float) -> float:
        """Time of the newest notice about pauses; the current time during a pause."""
        return now_s if self._paused else self._released_s

    def held_until_s(self, now_s: float) -> float:
        """Time up to which the clock was stopped, apart from standby."""
        return now_s if self.away else self.paused_until_s(now_s)

    def give_up_s(self, since_s: float, limit_s: float, now_s: float) -> float:
        """End of a wait for a notice; infinite on standby, and without a stream."""
        if self.away or self._is_standby:
            return math.inf
        held_s = max(self._turned_s, self._stood_by_s, self.paused_until_s(now_s))
        return max(since_s, held_s) + limit_s

    def work_done(
        self, give_up_s: float, away_limit_s: float, now_s: float, *, is_over: bool
    ) -> GenerationOver | WaitUntil:
        """Decide if other members still need a member that has done its work: at most until
        `give_up_s`, and for `away_limit_s` without a coordinator.
        """
        until_s = min(give_up_s, self.away_since_s + away_limit_s)
        done = is_over or now_s >= until_s
        return GenerationOver(over=is_over) if done else WaitUntil(until_s=until_s)
