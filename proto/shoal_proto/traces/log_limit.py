"""Limit on log lines that repeat, as during an outage."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

EACH_S = 10.0


@dataclass(slots=True)
class _EventCount:
    at_s: float
    num_left_out: int = 0


@dataclass(slots=True)
class LogLimit:
    """Logs an event at once, then at most one line in `each_s` seconds, with the number of lines
    left out. Not thread-safe."""

    log: structlog.typing.FilteringBoundLogger
    each_s: float = EACH_S
    clock: Callable[[], float] = time.monotonic
    _last_logged: dict[str, _EventCount] = field(default_factory=dict)

    def info(self, event: str, **fields: object) -> None:
        now_s, last = self.clock(), self._last_logged.get(event)
        if last is not None and now_s - last.at_s < self.each_s:
            last.num_left_out += 1
            return
        if last is not None and last.num_left_out:
            fields["num_left_out"] = last.num_left_out
        self._last_logged[event] = _EventCount(now_s)
        self.log.info(event, **fields)
