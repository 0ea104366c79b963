"""Tasks that outlive the call that starts them, each with an owner that ends it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import structlog

from shoal_proto.back_off import BackOff

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0

T = TypeVar("T")
R = TypeVar("R")


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel the tasks, and wait until all have ended. Their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_first(*waits: "Coroutine[Any, Any, object] | asyncio.Future[Any]") -> None:
    """Wait until one of the coroutines and tasks has ended. Then cancel the coroutines; tasks run
    on. Errors are not raised."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(*(task for each, task in zip(waits, tasks, strict=True) if each is not task))


async def gather_settled(*calls: Awaitable[R]) -> list[R]:
    """Wait until all calls have ended; return the answers in order, or raise the first failure in
    order."""
    answers: list[R] = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


async def run_until_done(work: Callable[[], Awaitable[object]], name: str) -> None:
    """Run `work` until it returns. An error is logged, and followed by a pause and a new start."""
    pauses = BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
    clock = asyncio.get_running_loop().time
    while True:
        began_s = clock()
        try:
            await work()
            return
        except Exception:
            log.exception("loop_failed", loop=name)
        if clock() - began_s > LONGEST_PAUSE_S:
            pauses.reset()
        await asyncio.sleep(pauses.pause_s())


async def run_restarting(work: Callable[[], Awaitable[object]], name: str) -> None:
    """Run `work`, a loop without end, until this call is cancelled. If `work` ends, it starts again
    after a pause."""
    while True:
        await run_until_done(work, name)
        log.error("loop_ended", loop=name)
        await asyncio.sleep(FIRST_PAUSE_S)


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run the coroutines during the block, and cancel them at its end. Their errors are logged."""
    async with SupervisedTasks() as tasks:
        for each in work:
            tasks.start(each)
        yield


async def gather_bounded(
    call: Callable[[T], Awaitable[R]], arguments: Iterable[T], at_once: int
) -> list[R]:
    """The answers in order, with at most `at_once` calls in progress. Raises the first error, once
    the other calls have ended."""
    slots = asyncio.Semaphore(at_once)

    async def one(argument: T) -> R:
        async with slots:
            return await call(argument)

    tasks = [asyncio.ensure_future(one(argument)) for argument in arguments]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)


class SupervisedTasks:
    """The tasks of one owner, on the event loop. A task's error is logged when it ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._by_key: dict[Hashable, asyncio.Task[Any]] = {}

    async def __aenter__(self) -> "SupervisedTasks":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, R], *, key: Hashable = None, name: str | None = None
    ) -> "asyncio.Task[R] | None":
        """Start a task. If a task with the same key is running, discard the work and return
        None."""
        known = self._by_key.get(key)
        # A task that is done may have looked for work before this request.
        if known is not None and not known.done():
            work.close()
            return None
        task = asyncio.create_task(work, name=name or getattr(work, "__qualname__", None))
        self._tasks.add(task)
        if key is not None:
            self._by_key[key] = task
        task.add_done_callback(partial(self._ended, key))
        return task

    async def close(self) -> None:
        """Cancel all running tasks, and wait until they have ended."""
        await cancel(*self._tasks)

    def _ended(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._by_key.get(key) is task:
            del self._by_key[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            work = task.get_name() if key is None else str(key)
            log.error("background_work_failed", work=work, exc_info=error)
