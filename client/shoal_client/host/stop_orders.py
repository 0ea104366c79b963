"""Orders to stop that arrive as several signals: Slurm and systemd signal every process of a job,
`timeout` signals a process and then its group, and launchers forward signals to their workers.
"""

import math
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

SAME_ORDER_S = 2.0
"""Time in which a second signal repeats an order, unless both are SIGINT."""
SIGNALS_SEEN_S = 1.0
"""Longest single wait of a main thread that handles signals: not every signal ends a wait."""


def next_of(entries: "queue.SimpleQueue[T]", within_s: float = math.inf) -> T:
    """Wait for the next entry; handlers of signals run within SIGNALS_SEEN_S. Raises queue.Empty
    after `within_s`."""
    until_s = time.monotonic() + within_s
    while True:
        left_s = max(0.0, until_s - time.monotonic())
        try:
            return entries.get(timeout=min(left_s, SIGNALS_SEEN_S))
        except queue.Empty:
            if left_s <= SIGNALS_SEEN_S:
                raise


class StopOrders:
    """Distinguishes the first signal of an order to stop from its repetitions. Takes no lock, so
    signal handlers may use it."""

    def __init__(self) -> None:
        self._first = 0
        self._first_s = float("-inf")

    @property
    def were_given(self) -> bool:
        """True if a signal was received."""
        return self._first != 0

    @property
    def is_fresh(self) -> bool:
        """True while a SIGTERM would repeat the newest order."""
        return time.monotonic() < self._first_s + SAME_ORDER_S

    @contextmanager
    def received(self, note: Callable[[int], object]) -> Iterator[None]:
        """Call `note` with the first signal of each order within the block, in place of the
        handlers of SIGINT and SIGTERM."""

        def handle(number: int, frame: FrameType | None) -> None:
            if not self.is_repeated(number):
                note(number)

        before = {
            number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def is_repeated(self, number: int) -> bool:
        """Record a signal; True if it repeats the newest order. Two SIGINTs are two orders: a
        person has pressed Ctrl-C twice.
        """
        if self.is_fresh and signal.SIGTERM in (number, self._first):
            return True
        self._first, self._first_s = number, time.monotonic()
        return False
