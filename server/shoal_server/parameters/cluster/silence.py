"""Measurement of another server's silence."""

import asyncio

from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts


class Silence:
    """Measures how long a message of another server is overdue. A suspension of this process counts
    as two heartbeats at most, as the process read no messages meanwhile. Lives on the event
    loop."""

    def __init__(self, timeouts: PeerTimeouts) -> None:
        self._timeouts = timeouts
        self._is_expected = False
        self._silent_s = 0.0

    def start_counting(self) -> None:
        """Start to count the silence, if it is not counted yet: a message is due."""
        self._is_expected = True

    def note_message(self) -> None:
        """End the silence; no message is due for now."""
        self._is_expected = False
        self._silent_s = 0.0

    async def wait(self) -> None:
        """Return once a message has been overdue for `silence_s`."""
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while self._silent_s < self._timeouts.silence_s:
            await asyncio.sleep(self._timeouts.beat_s)
            before_s, looked_s = looked_s, loop.time()
            if self._is_expected:
                self._silent_s += min(looked_s - before_s, 2 * self._timeouts.beat_s)
