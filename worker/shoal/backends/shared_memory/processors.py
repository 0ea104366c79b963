"""Placement of ranks on processors, so that ranks that wait for each other do not share one.

A kernel often wakes a rank on the processor of the rank that woke it, although another one is free;
in a virtual machine above all, where a processor that sleeps does not count as free (its host may
have given it away). Both then take turns for some milliseconds, until the kernel balances the load:
a step of a pipeline of two took 17.5 ms so, and 15.5 ms with the ranks kept apart.

So each rank notes its processor, and moves elsewhere if another rank noted the same one. It is not
pinned: the kernel may move it again at once. A mask that the user has set is respected; without
one, the rank may use processors that its cpuset gets later.
"""

import ctypes
import os
from collections.abc import Collection

NOTE_BYTES = 8
_ALL = b"\xff" * 1024
"""A bit for each of the 8,192 processors that Linux may have at most."""
_libc = ctypes.CDLL(None, use_errno=True)


class Processors:
    """Processors of the ranks of one memory, as one rank sees them. For one thread at a time."""

    def __init__(self, notes: memoryview, rank: int) -> None:
        """`notes`: 64 bits of each rank that all of them see, 0 at first."""
        self._notes, self._rank = notes, rank
        self._last_alone = -1
        """The processor on which this rank was last alone: its caches may be warm there."""
        self._may_move = True

    def part(self) -> None:
        """Note this thread's processor. If another rank noted the same one, move to a processor
        that no rank noted, if there is one."""
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
    """Allow all processors, also those that come later: the default if no mask was ever set."""
    if _libc.sched_setaffinity(0, len(_ALL), _ALL):
        raise OSError(ctypes.get_errno(), "sched_setaffinity failed")


def _note_of(number: int) -> int:
    return number + 1


def _next(number: int, free: Collection[int]) -> int:
    """The next one up: it is near."""
    return min(free, key=lambda each: (each < number, each))
