"""Tasks with an owner, waits for several of them, and results of many calls."""

import asyncio

import pytest
import structlog

from shoal_server.serving.tasks import (
    SupervisedTasks,
    gather_bounded,
    gather_settled,
    running,
    wait_first,
)


async def fail() -> None:
    raise ValueError("broken")


async def test_tasks_end_with_their_owner() -> None:
    """Running tasks are cancelled and awaited; failures are logged by name."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    with structlog.testing.capture_logs() as logs:
        async with SupervisedTasks() as tasks:
            tasks.start(work())
            failing = tasks.start(fail())
            assert failing is not None
            await asyncio.wait([failing])
            assert len(tasks) == 1
    assert ended == ["work"]
    assert [(each["event"], each["work"]) for each in logs] == [("background_work_failed", "fail")]


async def test_a_key_has_at_most_one_running_task() -> None:
    """Finished work may be started again."""
    free = asyncio.Event()
    async with SupervisedTasks() as tasks:
        first = tasks.start(free.wait(), key="a")
        assert first is not None
        assert tasks.start(free.wait(), key="a") is None
        assert tasks.start(free.wait(), key="b") is not None
        free.set()
        await first
        again = tasks.start(free.wait(), key="a")
        assert again is not None
        await again


async def test_background_work_runs_as_long_as_its_block() -> None:
    """Errors of the block are raised."""
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(60)

    with pytest.raises(ValueError, match="broken"):
        async with running(work()):
            await started.wait()
            await fail()


async def test_a_wait_for_several_ends_with_the_first() -> None:
    """Coroutines given to the call are cancelled; a task continues."""
    done, never = asyncio.Event(), asyncio.Event()
    other = asyncio.create_task(never.wait())
    asyncio.get_running_loop().call_soon(done.set)
    await wait_first(other, done.wait(), never.wait())
    assert not other.done()
    never.set()
    await wait_first(other)


async def test_results_of_many_calls_are_in_order() -> None:
    """`gather_bounded` runs so many at a time. The first failure is raised at once, or by
    `gather_settled` once all calls have ended."""
    num_running = most = 0

    async def double(number: int) -> int:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(0)
        num_running -= 1
        if number < 0:
            raise ValueError(str(number))
        return 2 * number

    assert await gather_bounded(double, range(6), 2) == [0, 2, 4, 6, 8, 10]
    assert most == 2
    with pytest.raises(ValueError, match="-1"):
        await gather_bounded(double, [1, -1, -2], 3)
    assert await gather_settled(double(1), double(2)) == [2, 4]
    with pytest.raises(ValueError, match="-3"):
        await gather_settled(double(1), double(-3), double(-4))
    assert num_running == 0
