"""Work on large shards pauses in proportion to the delay of the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shoal_server.parameters.replication.throttle import MAX_REST_S, RESTS, run_throttled

T = TypeVar("T")


async def took_s(late_s: float) -> float:
    """Return the time that a piece of work takes if the loop notices its end `late_s` later."""

    async def run(num_bytes: int, work: Callable[[], T]) -> T:
        result = work()
        await asyncio.sleep(late_s)
        return result

    loop = asyncio.get_running_loop()
    began_s = loop.time()
    assert await run_throttled(run, lambda: "done") == "done"
    return loop.time() - began_s


async def test_the_pause_is_in_proportion_and_bounded() -> None:
    assert await took_s(0.002) >= (1 + RESTS) * 0.002
    assert await took_s(0.1) >= 0.1 + MAX_REST_S
