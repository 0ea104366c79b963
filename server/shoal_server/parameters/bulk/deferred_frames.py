"""Frames that may wait, sent together because each send wakes the other end."""

import asyncio
from collections.abc import Hashable

from shoal_server.parameters.bulk.wire import FrameConnection

WITHIN_S = 0.005


class DeferredFrames:
    """Sends frames of `queue_frame` within WITHIN_S. Frames of `free` are sent with them, or once
    there are `freed_together` of them. All queued frames go before a frame of `send_now`. Lives on
    the event loop."""

    def __init__(self, wire: FrameConnection, freed_together: int) -> None:
        """`freed_together`: number of freed slots at which queued frames are sent."""
        self._wire = wire
        self._freed_together = freed_together
        self._newest: dict[Hashable, bytes] = {}
        self._freed: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def queue_frame(self, about: Hashable, frame: bytes) -> None:
        """Queue a frame in place of a queued one with the same `about`."""
        self._newest[about] = frame
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WITHIN_S, self._send)

    def free(self, frame: bytes) -> None:
        self._freed.append(frame)
        if len(self._freed) >= self._freed_together:
            self._send()

    def send_now(self, frame: bytes) -> bool:
        """Send queued frames, then `frame`; see `FrameConnection.send_now`. If False, `frame` is
        not sent, and queued frames are sent soon."""
        before = self._take()
        if self._wire.send_now(before + frame):
            return True
        if before:
            self._wire.send_soon(before)
        return False

    def close(self) -> None:
        """Stop the timer: queued frames are sent only before a later frame."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self) -> None:
        self._wire.send_soon(self._take())

    def _take(self) -> bytes:
        """Empty the queues. Frames of `queue_frame` come first: they acknowledge data in the freed
        slots."""
        self.close()
        waiting = b"".join([*self._newest.values(), *self._freed])
        self._newest.clear()
        self._freed.clear()
        return waiting
