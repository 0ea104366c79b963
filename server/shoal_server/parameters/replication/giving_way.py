"""Work on large shards that makes room for whoever pushes.

A shard on its way to another server is gigabytes of work, one chunk after the other, and nobody
waits for it but the redundancy of one shard. What a chunk costs others is how late the event loop
gets to those who have something to do; so after each chunk there is a rest, in proportion to how
late the loop got to the chunk itself. On an idle machine there is next to none.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from shoal_server.parameters.shard.workers import INLINE_BYTES, Runner

T = TypeVar("T")

LARGE = INLINE_BYTES + 1
"""Bytes of work that is always done by a thread."""
RESTS = 4
"""Times that long. At 1 ms, which is what a loop takes that has others to serve, a chunk of 2 ms
takes no more than a third of a core."""
MAX_REST_S = 0.01
"""However busy the machine is, a shard comes to its copy: 1 GB in about 8 s."""


async def giving_way(run: Runner, work: Callable[[], T]) -> T:
    """The result of work in a thread, after the rest that follows it."""

    def timed() -> tuple[T, float]:
        return work(), time.monotonic()

    result, ended_s = await run(LARGE, timed)
    late_s = time.monotonic() - ended_s
    await asyncio.sleep(min(RESTS * late_s, MAX_REST_S))
    return result
