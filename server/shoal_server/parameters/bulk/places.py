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

    def __init__(self, mapped: mmap.mmap, *, is_summed: bool = True) -> None:
        """Takes the mapping over. `is_summed`: whether both ends sum up what they put there."""
        self.is_summed = is_summed
        self._memory = memoryview(mapped)
        self._free = deque(range(0, len(mapped) - PLACE_BYTES + 1, PLACE_BYTES))
        self._freed = asyncio.Event()

    async def fill(self, data: memoryview) -> int:
        """Copy at most PLACE_BYTES into the next free place; where that begins."""
        while (at := self.fill_now(data)) is None:
            self._freed.clear()
            await self._freed.wait()
        return at

    def fill_now(self, data: memoryview) -> int | None:
        """The same where a place is free; None where none is."""
        if not self._free:
            return None
        at = self._free.popleft()
        self._memory[at : at + len(data)] = data
        return at

    def free(self, at: int) -> None:
        """The other end has taken what lay there."""
        self._free.append(at)
        self._freed.set()
