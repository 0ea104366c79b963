"""Frames that nobody waits for: they leave together, for each wakes the other end up."""

import asyncio
from collections.abc import Hashable

from shoal_server.parameters.bulk.wire import FrameConnection

WITHIN_S = 0.005


class LateFrames:
    """Lives on the event loop. What is put here leaves within WITHIN_S, and before anything that is
    sent by `send_now`."""

    def __init__(self, wire: FrameConnection, freed_together: int) -> None:
        """So many places that are given back leave at once, with all else that waits."""
        self._wire = wire
        self._freed_together = freed_together
        self._newest: dict[Hashable, bytes] = {}
        self._freed: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def put(self, about: Hashable, frame: bytes) -> None:
        """A frame that says all that an earlier one about the same said."""
        self._newest[about] = frame
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WITHIN_S, self._send)

    def free(self, frame: bytes) -> None:
        """A place is given back. Until there are enough of them, nothing is sent for that."""
        self._freed.append(frame)
        if len(self._freed) >= self._freed_together:
            self._send()

    def send_now(self, frame: bytes) -> bool:
        """See `FrameConnection.send_now`."""
        before = self._take()
        if self._wire.send_now(before + frame):
            return True
        if before:
            self._wire.send_soon(before)
        return False

    def close(self) -> None:
        """Nothing leaves by itself any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self) -> None:
        self._wire.send_soon(self._take())

    def _take(self) -> bytes:
        """All that waits. What was received first: then nobody needs what lies in the places."""
        self.close()
        waiting = b"".join([*self._newest.values(), *self._freed])
        self._newest.clear()
        self._freed.clear()
        return waiting
