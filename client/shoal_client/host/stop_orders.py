"""Orders to stop that come as several signals.

Slurm and systemd signal every process of a job, `timeout` a process and then its group, and a
launcher passes on to its workers what they were sent already.
"""

import signal
import time

SAME_ORDER_S = 2.0
"""A SIGTERM so soon behind the first signal of an order belongs to that order."""


class StopOrders:
    """Tells the first signal of an order to stop from those that repeat it. Takes no lock, so that
    signal handlers may use it."""

    def __init__(self) -> None:
        self._first = 0
        self._first_s = float("-inf")

    @property
    def is_fresh(self) -> bool:
        """True while a SIGTERM would repeat the newest order."""
        return time.monotonic() < self._first_s + SAME_ORDER_S

    def repeats(self, number: int) -> bool:
        """True if the signal repeats the newest order; otherwise it begins one.

        Two SIGINTs are two orders: a person has pressed Ctrl-C twice.
        """
        if self.is_fresh and signal.SIGTERM in (number, self._first):
            return True
        self._first, self._first_s = number, time.monotonic()
        return False
