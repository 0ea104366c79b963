"""Measured delays of an event loop."""

import asyncio
import time

from shoal_server.serving.loop_lag import SAMPLE_EACH_S, LoopLag


async def test_the_lag_is_at_least_the_time_that_a_loop_was_blocked() -> None:
    """The lag is 0 before the first sample."""
    async with LoopLag() as lag:
        assert (lag.p99_s, lag.max_s) == (0.0, 0.0)
        await asyncio.sleep(2 * SAMPLE_EACH_S)
        before_s = lag.max_s
        # Block the loop.
        asyncio.get_running_loop().call_soon(time.sleep, before_s + 0.2)
        await asyncio.sleep(2 * SAMPLE_EACH_S)
        assert lag.max_s >= before_s + 0.2 - SAMPLE_EACH_S
        assert lag.p99_s <= lag.max_s
