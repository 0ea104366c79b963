"""Pauses in reading from a connection, for pushes whose sender does not wait for an answer."""

from math import inf

PAUSE_S = 0.003
"""Length of a pause. Without pauses, each push wakes this process, and the kernel often runs it in
place of the process that has just written."""
MANY = 8
"""Maximum number of pushes in one pause: with more, the sender would soon wait for free slots."""
AWAITED_S = 0.1
"""Time without pauses after a push whose sender waits, or after more than MANY pushes at once."""


class ReadingPauses:
    """Decides on pauses of one connection, from the pushes that are read."""

    def __init__(self) -> None:
        self._num_read = 0
        self._may_wait = False
        self._awaited_s = -inf

    def read(self, *, may_wait: bool, now_s: float) -> None:
        """Note a push that was read. `may_wait`: its sender does not wait for the answer."""
        self._num_read += 1
        self._may_wait = may_wait
        if not may_wait or self._num_read > MANY:
            self._awaited_s = max(self._awaited_s, now_s)

    def end(self) -> None:
        """Make no further pauses: the connection ends once all data are read."""
        self._awaited_s = inf

    def take(self, now_s: float) -> float:
        """Return the length of the next pause, and forget the pushes that were read. Call it after
        all received data were read."""
        may_pause = self._may_wait and now_s - self._awaited_s >= AWAITED_S
        self._num_read, self._may_wait = 0, False
        return PAUSE_S if may_pause else 0.0
