"""Links from other servers whose data count as received once they are sent."""

import asyncio
from collections.abc import Callable

from shoal_server.core.processes import Holder


class IncomingLinks:
    def __init__(self) -> None:
        self._reading: dict[asyncio.Task[None], tuple[Holder, Callable[[], None]]] = {}

    def read_by(
        self, task: "asyncio.Task[None]", peer: Holder, end_reading: Callable[[], None]
    ) -> None:
        """Register the task that reads all that `peer` sends. `end_reading`: keeps the peer from
        sending more."""
        self._reading[task] = peer, end_reading
        task.add_done_callback(self._reading.pop)

    async def read_to_end(self, peer: Holder) -> None:
        """Keep `peer` from sending more; return once all that it sent is read."""
        tasks = [task for task, (other, _) in self._reading.items() if other == peer]
        for task in tasks:
            _, end_reading = self._reading[task]
            end_reading()
        if tasks:
            await asyncio.wait(tasks)
