"""Work on large shards that yields to pushes: each chunk is followed by a rest, in proportion to
the event loop's delay."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from shoal_server.parameters.shard.workers import INLINE_BYTES, Runner

T = TypeVar("T")

LARGE = INLINE_BYTES + 1
"""Size of work that always runs in a thread."""
RESTS = 4
"""Length of a rest, as a multiple of the loop's delay."""
MAX_REST_S = 0.01


async def run_throttled(run: Runner, work: Callable[[], T]) -> T:
    """Run `work` in a thread, rest, and return its result."""

    def timed() -> tuple[T, float]:
        return work(), time.monotonic()

    result, ended_s = await run(LARGE, timed)
    late_s = time.monotonic() - ended_s
    await asyncio.sleep(min(RESTS * late_s, MAX_REST_S))
    return result
