"""Measured delays of an event loop."""

import asyncio
import time

import pytest

from shoal_server.serving import loop_lag
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


async def test_a_stall_counts_for_its_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that stands still for a third of the time is late at the 99th percentile, although
    only one of its hundreds of wake-ups is late."""
    monkeypatch.setattr(loop_lag, "SAMPLE_EACH_S", 0.002)
    async with LoopLag() as lag:
        await asyncio.sleep(1.0)
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        await asyncio.sleep(2 * SAMPLE_EACH_S)
        assert lag.p99_s >= 0.4
