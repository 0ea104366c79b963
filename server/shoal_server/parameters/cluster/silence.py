"""How long another server has said nothing."""

import asyncio

from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts


class Silence:
    """Lives on the event loop. Time in which this process itself stood still does not count: what
    came meanwhile was not looked at."""

    def __init__(self, timeouts: PeerTimeouts) -> None:
        self._timeouts = timeouts
        self._is_expected = False
        self._silent_s = 0.0

    def expect(self) -> None:
        """From here on, if not before, the other one is to say something."""
        self._is_expected = True

    def heard(self) -> None:
        """It has."""
        self._is_expected = False
        self._silent_s = 0.0

    async def wait(self) -> None:
        """Return once it has said nothing for longer than servers put up with."""
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while self._silent_s < self._timeouts.silence_s:
            await asyncio.sleep(self._timeouts.beat_s)
            before_s, looked_s = looked_s, loop.time()
            if self._is_expected:
                self._silent_s += min(looked_s - before_s, 2 * self._timeouts.beat_s)
