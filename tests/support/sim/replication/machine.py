"""Processes that can be paused, woken and killed, each with its own clock, and a network."""

from collections import deque
from collections.abc import Callable
from itertools import count

from support.sim.virtual_time import Clock

MAX_DRIFT = 0.01
"""Largest difference between the rate of a process's clock and that of etcd's."""

Act = Callable[[], None]


class SimProcess:
    """Process with one thread. Actions that become due during a pause are run after it, in random
    order."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock = clock
        self.name = name
        self.alive = True
        self.paused_since_s: float | None = None
        self._began_s = clock.now_s
        self._rate = 1.0 + clock.random.uniform(-MAX_DRIFT, MAX_DRIFT)
        self._offset_s = clock.random.uniform(0.0, 1e5)
        self._parked: list[Act] = []

    @property
    def now_s(self) -> float:
        """Time by the process's own monotonic clock."""
        return self._offset_s + self._rate * (self.clock.now_s - self._began_s)

    def in_s(self, local_s: float) -> float:
        """Return the time, by the simulation's clock, until the process's clock shows
        `local_s`."""
        return max(0.0, (local_s - self.now_s) / self._rate)

    def act(self, delay_s: float, what: Act) -> None:
        self.clock.later(delay_s, lambda: self.do(what))

    def do(self, what: Act) -> None:
        if not self.alive:
            return
        if self.paused_since_s is not None:
            self._parked.append(what)
        else:
            what()

    def pause(self) -> None:
        if self.alive and self.paused_since_s is None:
            self.paused_since_s = self.clock.now_s

    def wake(self) -> None:
        self.paused_since_s = None
        parked, self._parked = self._parked, []
        for what in parked:
            self.act(self.clock.random.random() * 0.02, what)

    def die(self) -> None:
        self.alive = False
        self.paused_since_s = None
        self._parked.clear()


class Lane:
    """A thread of a process, which executes work in order; each piece takes its time."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process
        self._waiting: deque[tuple[float, Act]] = deque()

    def put(self, takes_s: float, what: Act) -> None:
        self._waiting.append((takes_s, what))
        if len(self._waiting) == 1:
            self._process.act(takes_s, self._end)

    def _end(self) -> None:
        _, what = self._waiting[0]
        what()
        self._waiting.popleft()
        if self._waiting:
            self._process.act(self._waiting[0][0], self._end)


class Network:
    """Network between named processes: each pair is connected, cut off, or slow."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._cut_since_s: dict[frozenset[str], float] = {}
        self._slow: dict[frozenset[str], float] = {}
        self._number = count()
        self.on_cut: Callable[[], None] = lambda: None
        self.on_mend: Callable[[], None] = lambda: None

    def cut(self, one: str, other: str) -> None:
        self._cut_since_s.setdefault(frozenset((one, other)), self._clock.now_s)
        self.on_cut()

    def mend(self, one: str, other: str) -> None:
        if self._cut_since_s.pop(frozenset((one, other)), None) is not None:
            self.on_mend()

    def slow_down(self, one: str, other: str, delay_s: float) -> None:
        """Delay messages by up to this time; 0: no delay."""
        self._slow[frozenset((one, other))] = delay_s

    def mend_all(self) -> None:
        self._cut_since_s.clear()
        self._slow.clear()
        self.on_mend()

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut_since_s

    def cut_since_s(self, one: str, other: str) -> float | None:
        return self._cut_since_s.get(frozenset((one, other)))

    def delay_s(self, one: str, other: str) -> float:
        chance = self._clock.random
        slow_s = self._slow.get(frozenset((one, other)), 0.0)
        if slow_s:
            return 0.001 + chance.random() * slow_s
        return chance.random() * (0.2 if chance.random() < 0.02 else 0.004)
