"""On which processor each rank runs, and how those that work hand in hand keep apart.

A kernel often wakes a rank on the processor of the rank that woke it, although another one is free;
in a virtual machine above all, where a processor that sleeps does not count as free (its host may
have given it away). Both then take turns for some milliseconds, until the kernel looks whether work
is spread well: a step of a pipeline of two took 17.5 ms so, and 15.5 ms where the ranks kept apart.

So each notes where it runs, and one that finds another's note for its own processor goes elsewhere.
It is held nowhere: the kernel may move it again at once, a mask that the user has set for it is
kept to, and where there is none, it may use what its cpuset gets later.
"""

import ctypes
import os
from collections.abc import Collection

NOTE_BYTES = 8
_ALL = b"\xff" * 1024
"""A bit for each of the 8,192 processors that Linux may have at most."""
_libc = ctypes.CDLL(None, use_errno=True)


class Processors:
    """Of the ranks of one memory, seen by one of them, by one thread at a time."""

    def __init__(self, notes: memoryview, rank: int) -> None:
        """`notes`: of each rank 64 bits that all of them see, 0 at first."""
        self._notes, self._rank = notes, rank
        self._last_alone = -1
        """Where this rank was last by itself: its caches may be warm there."""
        self._may_move = True

    def part(self) -> None:
        """Note where this thread runs; if another rank was last seen there, go where none was, if
        there is such a place."""
        number = int(_libc.sched_getcpu())
        self._notes[self._rank] = _note_of(number)
        if self._notes.tolist().count(_note_of(number)) == 1:
            self._last_alone = number
        elif self._may_move:
            self._move(number)

    def _move(self, number: int) -> None:
        allowed = os.sched_getaffinity(0)
        taken = self._notes.tolist()
        free = {each for each in allowed if _note_of(each) not in taken}
        if not free:
            return
        to = self._last_alone if self._last_alone in free else _next(number, free)
        # Ahead of the move: the other one is not to move as well.
        self._notes[self._rank] = _note_of(to)
        try:
            _move_within(allowed, to)
        except OSError:
            # Some sandboxes forbid it. It only saves time.
            self._may_move = False


def _move_within(allowed: set[int], to: int) -> None:
    """Run there, and be allowed then what was allowed, also if a signal's handler raises here."""
    try:
        os.sched_setaffinity(0, {to})
    finally:
        # Linux keeps the mask that was asked for, from 6.2 on: with `allowed` a thread that nobody
        # has held to anything would stay among these when its cpuset gets others.
        _ask_for_all()
        if os.sched_getaffinity(0) != allowed:
            os.sched_setaffinity(0, allowed)


def _ask_for_all() -> None:
    """For all processors, also those that are not there yet: as where nothing was asked for."""
    if _libc.sched_setaffinity(0, len(_ALL), _ALL):
        raise OSError(ctypes.get_errno(), "sched_setaffinity failed")


def _note_of(number: int) -> int:
    return number + 1


def _next(number: int, free: Collection[int]) -> int:
    """The next one up: it is near."""
    return min(free, key=lambda each: (each < number, each))
