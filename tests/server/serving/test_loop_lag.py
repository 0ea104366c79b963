"""What holds an event loop up is seen."""

import asyncio
import time

from shoal_server.serving.loop_lag import SAMPLE_EACH_S, LoopLag


async def test_a_loop_that_stood_still_was_late() -> None:
    """By as long as it stood still; one that had nothing else to do was not."""
    async with LoopLag() as lag:
        assert (lag.p99_s, lag.max_s) == (0.0, 0.0)
        await asyncio.sleep(2 * SAMPLE_EACH_S)
        before_s = lag.max_s
        # This is what must not happen on a loop.
        asyncio.get_running_loop().call_soon(time.sleep, before_s + 0.2)
        await asyncio.sleep(2 * SAMPLE_EACH_S)
        assert lag.max_s >= before_s + 0.2 - SAMPLE_EACH_S
        assert lag.p99_s <= lag.max_s
