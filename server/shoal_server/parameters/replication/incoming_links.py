"""Links from other servers over which what was sent counts as received before it is read."""

import asyncio
from collections.abc import Callable

from shoal_server.core.shards.assignments import Holder


class IncomingLinks:
    """Lives on the event loop."""

    def __init__(self) -> None:
        self._reading: dict[asyncio.Task[None], tuple[Holder, Callable[[], None]]] = {}

    def read_by(
        self, task: "asyncio.Task[None]", peer: Holder, end_reading: Callable[[], None]
    ) -> None:
        """The task reads what that server sends, to its end. From `end_reading` on it can send
        nothing more."""
        self._reading[task] = peer, end_reading
        task.add_done_callback(self._reading.pop)

    async def read_to_end(self, peer: Holder) -> None:
        """Take nothing more of what that server sends over its links; return once all that it has
        sent is read."""
        tasks = [task for task, (other, _) in self._reading.items() if other == peer]
        for task in tasks:
            _, end_reading = self._reading[task]
            end_reading()
        if tasks:
            await asyncio.wait(tasks)
