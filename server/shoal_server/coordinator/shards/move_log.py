"""Log of moved shards, written once moves pause: rebalancing moves a few shards at a time, and one
line for each move would hide other events."""

import asyncio
from collections import Counter
from collections.abc import Callable

from shoal_server.core.shards.moves import Moves, moves_in_words

QUIET_S = 2.0
"""Time without a further move after which moves are reported."""
AT_MOST_S = 20.0
"""Maximum time after the first move until moves are reported."""


class MoveLog:
    """Moves not reported yet, on the event loop of the leading coordinator."""

    def __init__(self, log_line: Callable[[str, str], object]) -> None:
        """`log_line` is called with a job and a line to log for it."""
        self._log_line = log_line
        self._pending: dict[str, Moves] = {}
        self._report_by_s: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def add(self, job: str, moves: Moves) -> None:
        if not moves:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._pending.setdefault(job, Counter()).update(moves)
        by_s = self._report_by_s.setdefault(job, now_s + AT_MOST_S)
        if job in self._timers:
            self._timers[job].cancel()
        self._timers[job] = loop.call_at(min(now_s + QUIET_S, by_s), self._report, job)

    def forget(self, job: str) -> None:
        """Drop the moves that have not been reported yet."""
        self._pending.pop(job, None)
        self._report_by_s.pop(job, None)
        if (timer := self._timers.pop(job, None)) is not None:
            timer.cancel()

    def _report(self, job: str) -> None:
        moves = self._pending[job]
        self.forget(job)
        for line in moves_in_words(moves):
            self._log_line(job, line)
