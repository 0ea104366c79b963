"""Delays of an event loop are measured."""

import asyncio
import time

from shoal_server.serving.loop_lag import SAMPLE_EACH_S, LoopLag


async def test_a_loop_that_stood_still_was_late() -> None:
    """The lag is as long as the loop stood still; an idle loop has none."""
    async with LoopLag() as lag:
        assert (lag.p99_s, lag.max_s) == (0.0, 0.0)
        await asyncio.sleep(2 * SAMPLE_EACH_S)
        before_s = lag.max_s
        # Work like this must never run on a loop.
        asyncio.get_running_loop().call_soon(time.sleep, before_s + 0.2)
        await asyncio.sleep(2 * SAMPLE_EACH_S)
        assert lag.max_s >= before_s + 0.2 - SAMPLE_EACH_S
        assert lag.p99_s <= lag.max_s
