"""Work that goes on beside the calls: at most one piece of each kind at a time."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Background:
    """Lives on the event loop. What a piece of work raises is logged: nobody waits for it."""

    def __init__(self) -> None:
        self._tasks: dict[object, asyncio.Task[None]] = {}

    def start(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        """Run it, unless work of that key is under way."""
        known = self._tasks.get(key)
        # One that is done may have looked around for the last time before this was asked for.
        if known is not None and not known.done():
            work.close()
            return
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(partial(self._ended, key))

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, key: object, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and task.exception() is not None:
            log.error("background_work_failed", work=str(key), exc_info=task.exception())
