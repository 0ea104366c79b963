"""Where work on shards runs: small pieces at once, large ones in threads."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

T = TypeVar("T")

INLINE_BYTES = 256 * 1024
"""Up to it, a hop to another thread costs more than the work."""


class Runner(Protocol):
    """Does work that touches so many bytes, without holding up the event loop."""

    def __call__(self, num_bytes: int, work: Callable[[], T]) -> Awaitable[T]: ...


class Workers:
    """Call it on the event loop."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool

    def __call__(self, num_bytes: int, work: Callable[[], T]) -> Awaitable[T]:
        """The result of `work`, which touches so many bytes, without holding up the event loop.
        What small work raises is raised at once."""
        loop = asyncio.get_running_loop()
        if num_bytes > INLINE_BYTES:
            return loop.run_in_executor(self._pool, work)
        done: asyncio.Future[T] = loop.create_future()
        done.set_result(work())
        return done
