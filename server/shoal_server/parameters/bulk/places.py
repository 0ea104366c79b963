"""Memory of another server that this one writes into, in places of one size."""

import asyncio
import mmap
from collections import deque

PLACE_BYTES = 2 * 1024 * 1024
"""Most shards of parameters fit into one: their pushes then lie in one piece at the other end."""
NUM_PLACES = 8


class Places:
    """Lives on the event loop. A place is filled, told of, and free again once the other end says
    so."""

    def __init__(self, mapped: mmap.mmap) -> None:
        """Takes the mapping over."""
        self._memory = memoryview(mapped)
        self._free = deque(range(0, len(mapped) - PLACE_BYTES + 1, PLACE_BYTES))
        self._freed = asyncio.Event()

    async def fill(self, data: memoryview) -> int:
        """Copy at most PLACE_BYTES into the next free place; where that begins."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        at = self._free.popleft()
        self._memory[at : at + len(data)] = data
        return at

    def free(self, at: int) -> None:
        """The other end has taken what lay there."""
        self._free.append(at)
        self._freed.set()
