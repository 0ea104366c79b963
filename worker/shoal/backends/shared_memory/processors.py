"""Placement of ranks on processors: ranks that wait for each other do not share a processor.

The kernel often wakes a rank on the waker's processor although another one is free: a step of a
two-stage pipeline took 17.5 ms with such wake-ups, and 15.5 ms without.

So each rank notes its processor, and moves if another rank has noted the same one. The rank is not
pinned, and a user's affinity mask is kept.
"""

import ctypes
import os
from collections.abc import Collection

NOTE_BYTES = 8
_ALL = b"\xff" * 1024
"""All bits set: Linux has at most 8,192 processors."""
libc = ctypes.CDLL(None, use_errno=True)


class Processors:
    """A rank's view of the processors. Not thread-safe."""

    def __init__(self, notes: memoryview, rank: int) -> None:
        """`notes`: shared memory with 64 bits for each rank, 0 at first."""
        self._notes, self._rank = notes, rank
        self._last_alone = -1
        """The last processor on which this rank was alone."""
        self._may_move = True

    def avoid_shared_processor(self) -> None:
        """Note this thread's processor. If another rank has noted it too, move to a processor that
        no rank has noted."""
        number = int(libc.sched_getcpu())
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
        # Noted first, so that the other rank does not move too.
        self._notes[self._rank] = _note_of(to)
        try:
            _move_within(allowed, to)
        except OSError:
            # Some sandboxes forbid moves. The rank then stays, which only costs time.
            self._may_move = False


def _move_within(allowed: set[int], to: int) -> None:
    try:
        os.sched_setaffinity(0, {to})
    finally:
        # Since version 6.2 Linux keeps the mask that was asked for: asking only for `allowed` would
        # exclude processors that the cpuset gets later.
        _ask_for_all()
        if os.sched_getaffinity(0) != allowed:
            os.sched_setaffinity(0, allowed)


def _ask_for_all() -> None:
    if libc.sched_setaffinity(0, len(_ALL), _ALL):
        raise OSError(ctypes.get_errno(), "sched_setaffinity failed")


def _note_of(number: int) -> int:
    return number + 1


def _next(number: int, free: Collection[int]) -> int:
    """Return the free processor with the next higher number: probably a near one."""
    return min(free, key=lambda each: (each < number, each))
