"""Background loops: one that fails or ends begins again, and this is logged with its name."""

import asyncio

import pytest
import structlog

from shoal_server.serving import tasks


async def test_a_loop_that_fails_or_ends_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.001)
    times, lives = 0, asyncio.Event()

    async def loop() -> None:
        nonlocal times
        times += 1
        if times == 1:
            raise KeyError("x")
        if times == 3:
            lives.set()
            await asyncio.Event().wait()

    with structlog.testing.capture_logs() as logs:
        async with tasks.running(tasks.run_restarting(loop, "shards")), asyncio.timeout(10.0):
            await lives.wait()
    logged = [(entry["event"], entry["loop"]) for entry in logs]
    assert logged == [("loop_failed", "shards"), ("loop_ended", "shards")]
