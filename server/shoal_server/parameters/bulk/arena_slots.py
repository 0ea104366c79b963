"""Another server's shared memory that this server writes to, in slots of one size."""

import asyncio
import ctypes
import mmap
from collections import deque
from collections.abc import Callable

SLOT_BYTES = 2 * 1024 * 1024
"""Shards of a model of up to 0.9 GB are smaller (`core/shards/placement.py`), so a push to one of
them is one piece."""
NUM_SLOTS = 16
"""Twice the number of a push's shards in progress at a time. The other end frees slots in batches
of half this number, which leaves enough."""


class ArenaSlots:
    """The slots of one connection, for the event loop. The other end frees each slot that was
    filled and announced."""

    def __init__(self, mapped: mmap.mmap) -> None:
        """Takes ownership of the mapping."""
        self._memory = memoryview(mapped)
        self._free = deque(range(0, len(mapped) - SLOT_BYTES + 1, SLOT_BYTES))
        self._freed = asyncio.Event()
        self._before_free: dict[int, Callable[[], None]] = {}
        self._draft: tuple[int, int] | None = None
        """Offset and address of a filled slot that is not announced yet."""

    async def fill(self, data: memoryview) -> int:
        """Wait for a free slot, copy the data, at most SLOT_BYTES, to it, and return its offset. If
        the data are the latest draft, return the draft's slot at once."""
        while (at := self.fill_now(data)) is None:
            self._freed.clear()
            await self._freed.wait()
        return at

    def fill_now(self, data: memoryview) -> int | None:
        """`fill` without waiting; None if no slot is free."""
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
        """Copy the data, at most SLOT_BYTES, to a slot before it is known if they will be sent.
        Return the copy, or None if no slot is free. A new draft replaces the previous one."""
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
        """Let this process read a slot: `keep` gets its memory, and returns the function to call
        before the slot is freed."""
        self._before_free[at] = keep(self._memory[at : at + num_bytes])

    def free(self, at: int) -> None:
        if (before := self._before_free.pop(at, None)) is not None:
            before()
        self._free.append(at)
        self._freed.set()


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
