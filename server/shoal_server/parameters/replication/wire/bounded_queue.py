"""Bounded queue between two tasks."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """A queue to which one task adds items, and from which another takes them. Lives on the event
    loop."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[T] = deque()
        self._is_ended = False
        self._put = asyncio.Event()
        self._taken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_over(self) -> bool:
        """True if the queue was ended and is empty."""
        return self._is_ended and not self._items

    @property
    def has_capacity(self) -> bool:
        """True if there is room, or the queue was ended."""
        return len(self._items) < self._max_items or self._is_ended

    async def await_capacity(self) -> None:
        """Return once there is room, or the queue was ended."""
        while not self.has_capacity:
            self._taken.clear()
            await self._taken.wait()

    def put_now(self, item: T) -> None:
        """Add an item even if there is no room; do nothing if the queue was ended."""
        if not self._is_ended:
            self._items.append(item)
            self._put.set()

    def end(self) -> None:
        """End the queue: later items are ignored."""
        self._is_ended = True
        self._put.set()
        self._taken.set()

    async def take(self, within_s: float) -> T | None:
        """Return the next item; None after `within_s` seconds, or if the queue was ended and is
        empty."""
        if not self._items and not self._is_ended:
            self._put.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._put.wait()
            except TimeoutError:
                return None
        if not self._items:
            return None
        self._taken.set()
        return self._items.popleft()
