"""When what comes over a connection may lie unread for a while."""

from math import inf

PAUSE_S = 0.003
"""As long as nobody waits for what is read, it is read so much later: for the kernel often has who
is woken up run at once, in the place of who has just written."""
MANY = 8
"""Pushes of one pause; who sends as many would soon wait for what they lie in."""
AWAITED_S = 0.1
"""Since anybody waited last: so long no pause is made."""


class ReadingPauses:
    """Of one connection. Is told of each push that is read."""

    def __init__(self) -> None:
        self._num_read = 0
        self._may_wait = False
        self._awaited_s = -inf

    def read(self, *, may_wait: bool, now_s: float) -> None:
        """A push was; `may_wait`: whether nobody waits for what follows."""
        self._num_read += 1
        self._may_wait = may_wait
        if not may_wait or self._num_read > MANY:
            self._awaited_s = max(self._awaited_s, now_s)

    def end(self) -> None:
        """Somebody waits until all is read: no more of them."""
        self._awaited_s = inf

    def take(self, now_s: float) -> float:
        """All that has come is read: for how many seconds to let be what comes next."""
        may_pause = self._may_wait and now_s - self._awaited_s >= AWAITED_S
        self._num_read, self._may_wait = 0, False
        return PAUSE_S if may_pause else 0.0
