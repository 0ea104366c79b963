"""Tasks with an owner, and answers of many calls."""

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


async def test_one_task_a_key() -> None:
    """Running work of a key is not started twice; finished work is."""
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


async def test_work_beside_a_block() -> None:
    """The work runs as long as the block, and errors of the block are raised."""
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(60)

    with pytest.raises(ValueError, match="broken"):
        async with running(work()):
            await started.wait()
            await fail()


async def test_the_first_of_several() -> None:
    """Waits started for the call are cancelled; an independent task goes on."""
    done, never = asyncio.Event(), asyncio.Event()
    other = asyncio.create_task(never.wait())
    asyncio.get_running_loop().call_soon(done.set)
    await wait_first(other, done.wait(), never.wait())
    assert not other.done()
    never.set()
    await wait_first(other)


async def test_answers_of_many_calls() -> None:
    """Answers are in order, so many at a time; the first failure is raised at once or last."""
    under_way = most = 0

    async def double(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
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
    assert under_way == 0
