"""Time limit for a stream's first reply, after which another replica is asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from shoal_proto.errors import Unavailable

MAX_FACTOR = 8


class Cancellable(Protocol):
    """A gRPC stream, of which only `cancel` is used."""

    def cancel(self) -> bool: ...


class FirstReplyTimeout:
    """Cancels a stream whose first reply is late: a replica may accept connections and not answer,
    because its process is stopped or starved. The limit doubles each time, up to MAX_FACTOR times
    the first one, until there is a reply."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._limit_s = first_s
        self._timer: threading.Timer | None = None
        self._waited_s = 0.0

    @contextmanager
    def until_answered(self, stream: Cancellable) -> Iterator[None]:
        """Cancel the stream in the block if its first reply takes longer than the limit."""
        limit_s, self._waited_s = self._limit_s, 0.0

        def give_up() -> None:
            self._waited_s = limit_s
            stream.cancel()

        self._timer = threading.Timer(limit_s, give_up)
        self._timer.daemon = True
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()

    def record_reply(self) -> None:
        """Record a reply: the stream has no time limit after it."""
        if self._timer is not None:
            self._timer.cancel()
        self._limit_s = self._first_s

    def error(self, address: str) -> Unavailable | None:
        """Error for the stream that just ended, if the time limit ended it; else None. With an
        error, the next limit is doubled."""
        if not self._waited_s:
            return None
        self._limit_s = min(2 * self._limit_s, MAX_FACTOR * self._first_s)
        return Unavailable(
            f"the coordinator at {address} accepts connections and does not answer",
            seen=f"nothing for {self._waited_s:g} s",
            expected="an admission, or the address of the leader",
        )
