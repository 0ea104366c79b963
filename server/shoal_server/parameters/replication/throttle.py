"""Work on large shards that yields to pushes.

A copy of a shard may have gigabytes. It is sent to another server chunk by chunk, and no call waits
for it. But the work on each chunk delays the event loop, and with it other calls. So each chunk is
followed by a rest, in proportion to the loop's delay after the chunk. On an idle machine the rest
is close to zero.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from shoal_server.parameters.shard.workers import INLINE_BYTES, Runner

T = TypeVar("T")

LARGE = INLINE_BYTES + 1
"""A size of work that always runs in a thread."""
RESTS = 4
"""Length of a rest in multiples of the loop's delay. With a delay of 1 ms, which is typical of a
busy loop, chunks that take 2 ms use at most a third of a core."""
MAX_REST_S = 0.01
"""Longest rest. All rests together add at most 5 s to the copy of 1 GB in chunks of 2 MiB."""


async def run_throttled(run: Runner, work: Callable[[], T]) -> T:
    """Run `work` in a thread, rest, and return its result."""

    def timed() -> tuple[T, float]:
        return work(), time.monotonic()

    result, ended_s = await run(LARGE, timed)
    late_s = time.monotonic() - ended_s
    await asyncio.sleep(min(RESTS * late_s, MAX_REST_S))
    return result
