"""Virtual time: events in order of time, and threads that are generators."""

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

FOREVER_S = 1e9

T = TypeVar("T")


@dataclass(frozen=True)
class Wait:
    """A wait that a thread yields; it ends once the condition holds or the time is over."""

    holds: Callable[[], bool]
    timeout_s: float = FOREVER_S


Steps = Generator[Wait, bool, T]
"""Body of a thread: a yielded wait returns True if its condition held."""


def sleep(seconds: float) -> Wait:
    return Wait(lambda: False, seconds)


@dataclass(eq=False)
class Box:
    """The outcome of an asynchronous action; only the first `set` has an effect."""

    on_set: Callable[[], None] = lambda: None
    done: bool = False
    error: Exception | None = None

    def set(self, error: Exception | None = None) -> None:
        if not self.done:
            self.done, self.error = True, error
            self.on_set()


class Clock:
    """The clock and queue of events of a simulation, and its only source of randomness."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, act))

    def soon(self, act: Callable[[], None], within_s: float = 0.001) -> None:
        """Act within a short time, in random order with other such actions."""
        self.later(self.random.random() * within_s, act)

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._queue)
            act()
        self.now_s = until_s


@dataclass(eq=False)
class Process:
    """Threads that are halted and killed together."""

    clock: Clock
    alive: bool = True
    halted: bool = False
    was_halted: bool = False
    _threads: list["Thread"] = field(default_factory=list)
    _parked: list[Callable[[], None]] = field(default_factory=list)

    def start(self, body: Steps[None]) -> "Thread":
        thread = Thread(self, body)
        self._threads.append(thread)
        self.act(lambda: thread.go_on(False))
        return thread

    def act(self, what: Callable[[], None]) -> None:
        """Act soon; not while halted, and never once dead."""
        busy = self.clock.random.random() < 0.05
        self.clock.soon(lambda: self.do(what), 0.05 if busy else 0.001)

    def do(self, what: Callable[[], None]) -> None:
        if self.halted:
            self._parked.append(what)
        elif self.alive:
            what()

    def changed(self) -> None:
        """Notify threads of a change that they may wait for."""
        self._threads = [thread for thread in self._threads if not thread.ended]
        for thread in self._threads:
            thread.look()

    def halt(self) -> None:
        self.halted = self.was_halted = True

    def go_on(self) -> None:
        self.halted = False
        parked, self._parked = self._parked, []
        for what in parked:
            self.do(what)

    def die(self) -> None:
        self.alive = self.halted = False
        self._threads.clear()
        self._parked.clear()


class Thread:
    def __init__(self, process: Process, body: Steps[None]) -> None:
        self._process = process
        self._body = body
        self._wait: Wait | None = None
        self._turn = 0
        self.ended = False

    def look(self) -> None:
        if self._wait is not None and self._wait.holds():
            self._resume(True)

    def _resume(self, held: bool) -> None:
        self._wait, turn = None, self._turn
        self._process.act(lambda: self.go_on(held) if turn == self._turn else None)

    def go_on(self, held: bool) -> None:
        self._turn += 1
        while True:
            try:
                wait = self._body.send(held) if self._turn > 1 else next(self._body)
            except StopIteration:
                self.ended = True
                return
            if wait.holds():
                held = True
                self._turn += 1
                continue
            break
        self._wait, turn = wait, self._turn
        if wait.timeout_s < FOREVER_S:
            clock = self._process.clock
            clock.later(max(wait.timeout_s, 0.0), lambda: self._time_over(turn))

    def _time_over(self, turn: int) -> None:
        if turn == self._turn and self._wait is not None:
            self._resume(False)
