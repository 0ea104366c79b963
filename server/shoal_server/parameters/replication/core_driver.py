"""Passes events to the replication core, and its effects to its edges."""

import asyncio
from collections import deque
from collections.abc import Callable

from shoal_server.core.replication.protocol.effects import Effect
from shoal_server.core.replication.protocol.events import Event, WakeTimeReached
from shoal_server.core.replication.replication_core import ReplicationCore

TIMED_WITHIN_S = 0.002
"""Time from an event until the timer is set, once for all events in this time."""


class CoreDriver:
    """Handles an event with all its effects before the next event."""

    def __init__(self, core: ReplicationCore) -> None:
        self.core = core
        self._loop = asyncio.get_running_loop()
        self._carry_out: Callable[[Effect], None] | None = None
        self._waiting: deque[Event] = deque()
        self._is_stepping = False
        self._is_closed = False
        self._is_timer_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_s = float("inf")

    def set_effect_handler(self, carry_out: Callable[[Effect], None]) -> None:
        """Set the function that carries out effects, before the first event. It must return at
        once; the result of longer work is an event."""
        self._carry_out = carry_out

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def submit_event(self, event: Event) -> None:
        """Handle an event. During an effect, the event waits for the current one and all waiting
        ones."""
        self._waiting.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._waiting:
                self._step(self._waiting.popleft())
        finally:
            self._is_stepping = False
        if not self._is_timer_due:
            # Set the timer once for many events, and after the work that calls wait for.
            self._is_timer_due = True
            self._loop.call_later(TIMED_WITHIN_S, self._set_timer)

    def _step(self, event: Event) -> None:
        carry_out = self._carry_out
        assert carry_out is not None, "the effect handler is set before the first event"
        for effect in self.core.step(event, self._loop.time()):
            carry_out(effect)

    def _set_timer(self) -> None:
        self._is_timer_due = False
        if self._is_closed:
            return
        wakes_s = self.core.wakes_s()
        if wakes_s == self._wakes_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wakes_s = wakes_s
        if wakes_s < float("inf"):
            self._timer = self._loop.call_at(wakes_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.submit_event(WakeTimeReached())
