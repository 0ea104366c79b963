"""Where work on shards runs: small pieces at once, large ones in threads."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

T = TypeVar("T")

INLINE_BYTES = 2 * 1024 * 1024
"""Up to it, the hop to another thread and back costs as much as the work or more: 0.4 ms of
processor time, in which SGD is through with a MiB."""
ROWS_COST = 8
"""To find rows by their ids, to gather them and to put them back takes so many times as long as to
go through as many bytes in a row."""


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
