"""An event loop on a separate thread, for tests that are not coroutines."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

LIMIT_S = 60.0

T = TypeVar("T")


class LoopThread:
    """Thread with an event loop, which runs during its `with` block, or from `start` to `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        try:
            # The work given to the executor has ended, so its threads end without delay.
            self.run(self._loop.shutdown_default_executor())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait for the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)
