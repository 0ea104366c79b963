"""Lag of an event loop: how late it runs callbacks that are due."""

import asyncio
from collections import deque
from types import TracebackType

from shoal_server.serving.tasks import cancel

SAMPLE_EACH_S = 0.02
NUM_SAMPLES = 500
"""Samples of ten seconds."""


class LoopLag:
    """Measures how late the loop wakes a sleeping task, while its `async with` block runs."""

    def __init__(self) -> None:
        self._lags_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopLag":
        self._task = asyncio.create_task(self._sample(), name="loop-lag")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            await cancel(self._task)

    @property
    def p99_s(self) -> float:
        """99th percentile of the lag; 0 before the first sample."""
        lags_s = sorted(self._lags_s)
        return lags_s[int(0.99 * len(lags_s))] if lags_s else 0.0

    @property
    def max_s(self) -> float:
        """Longest lag; 0 before the first sample."""
        return max(self._lags_s, default=0.0)

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + SAMPLE_EACH_S
            await asyncio.sleep(SAMPLE_EACH_S)
            lag_s = max(0.0, loop.time() - due_s)
            # A long stall counts for each sample that was due in it, not as one of 500.
            num_due = min(1 + int(lag_s / SAMPLE_EACH_S), NUM_SAMPLES)
            self._lags_s.extend(lag_s - missed * SAMPLE_EACH_S for missed in range(num_due))
