"""Memory of another server that this one writes into, in places of one size."""

import asyncio
import ctypes
import mmap
from collections import deque
from collections.abc import Callable

PLACE_BYTES = 2 * 1024 * 1024
"""Most shards of parameters fit into one: their pushes then lie in one piece at the other end."""
NUM_PLACES = 16
"""Twice as many as shards of one push are worked on at a time: there is a free one for each,
although half of them are given back at once."""


class Places:
    """Lives on the event loop. A place is filled, told of, and free again once the other end says
    so."""

    def __init__(self, mapped: mmap.mmap) -> None:
        """Takes the mapping over."""
        self._memory = memoryview(mapped)
        self._free = deque(range(0, len(mapped) - PLACE_BYTES + 1, PLACE_BYTES))
        self._freed = asyncio.Event()
        self._before_free: dict[int, Callable[[], None]] = {}
        self._draft: tuple[int, int] | None = None
        """A place that is filled and not told of, and where that is in memory."""

    async def fill(self, data: memoryview) -> int:
        """Copy at most PLACE_BYTES into the next free place; where that begins."""
        while (at := self.fill_now(data)) is None:
            self._freed.clear()
            await self._freed.wait()
        return at

    def fill_now(self, data: memoryview) -> int | None:
        """The same where a place is free; None where none is. What was drafted last lies in its
        place already."""
        draft, is_here = self._draft, data.obj is self._memory.obj
        if draft is not None and is_here and draft[1] == _address(data):
            self._draft = None
            return draft[0]
        if not self._free:
            return None
        at = self._free.popleft()
        self._memory[at : at + len(data)] = data
        return at

    def draft(self, data: memoryview) -> memoryview | None:
        """At most PLACE_BYTES, copied into a place before it is known whether they are told of: no
        other draft is looked at by then. None where no place is free."""
        if self._draft is None:
            if not self._free:
                return None
            at = self._free.popleft()
        else:
            at = self._draft[0]
        drafted = self._memory[at : at + len(data)]
        drafted[:] = data
        self._draft = at, _address(drafted)
        return drafted

    def lend(
        self, at: int, num_bytes: int, keep: Callable[[memoryview], Callable[[], None]]
    ) -> None:
        """Let somebody else read what lies there, too: what `keep` gives is called before the place
        is free."""
        self._before_free[at] = keep(self._memory[at : at + num_bytes])

    def free(self, at: int) -> None:
        """The other end has taken what lay there."""
        if (before := self._before_free.pop(at, None)) is not None:
            before()
        self._free.append(at)
        self._freed.set()


def _address(data: memoryview) -> int:
    """Where in memory the bytes begin, which can be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
