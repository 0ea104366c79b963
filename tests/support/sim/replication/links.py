"""Connections between servers, in order in each direction, until an end or the network breaks them.

A connection between servers on one machine loses no message that was sent before an end was closed:
messages are in the memory of the receiving process, which reads all of them, as a real server does.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from support.sim.replication.machine import Network, SimProcess
from support.sim.virtual_time import Clock

SILENCE_S = 2.0
"""Silence after which one end considers the link broken."""


LATE_S = 1.5
"""Longest delay of a read by a busy process."""


@dataclass(frozen=True, slots=True)
class HangUp:
    """Message that the other end has closed the link, or that its process has ended."""


@dataclass(eq=False)
class End:
    """An end of a link, in its process."""

    process: SimProcess
    receive: Callable[[object], None]
    broken: Callable[[], None]
    is_open: bool = True
    has_replied: bool = False
    last_s: float = 0.0
    """Arrival time of the last message in transit to this end."""
    coming: deque[object] = field(default_factory=deque)
    takes: bool = True
    """False if nothing more can be sent to this end."""


class Link:
    """A link; its first end is the opener's."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        opener: End,
        acceptor: End,
        *,
        is_local: bool = False,
    ) -> None:
        self.is_local = is_local
        self._clock = clock
        self._network = network
        self.ends = (opener, acceptor)
        self._watched = False

    @property
    def is_over(self) -> bool:
        return not any(end.is_open and end.process.alive for end in self.ends)

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def send(self, end: End, message: object) -> bool:
        """Send a message; True if it is already in the memory of the other end's process."""
        other = self.other(end)
        if not end.is_open or not other.takes:
            return False
        self._put(other, message)
        return self.is_local and other.is_open and other.process.alive

    def read_to_end(self, end: End) -> None:
        """Stop receiving at this end; messages sent before are received."""
        if not (self.is_local and end.is_open):
            return
        end.takes = False
        while end.coming:
            message = end.coming.popleft()
            if not isinstance(message, HangUp):
                end.receive(message)
        self._break(end)

    def close(self, end: End) -> None:
        """Close the end. The last messages in transit to the other end may be lost."""
        if not end.is_open:
            return
        end.is_open = False
        other = self.other(end)
        chance = self._clock.random
        if other.coming and not self.is_local and chance.random() < 0.5:
            for _ in range(chance.randint(0, len(other.coming))):
                other.coming.pop()
        self._put(other, HangUp())

    def process_died(self, end: End) -> None:
        end.is_open = False
        self._put(self.other(end), HangUp())

    def _put(self, to: End, message: object) -> None:
        now_s = self._clock.now_s
        delay_s = self._network.delay_s(*(end.process.name for end in self.ends))
        if self.is_local and self._clock.random.random() < 0.03:
            # The other end is busy, and reads it late.
            delay_s += self._clock.random.random() * LATE_S
        to.last_s = max(to.last_s, now_s + delay_s)
        to.coming.append(message)
        self._clock.later(to.last_s - now_s, lambda: self._arrive(to))

    def _arrive(self, end: End) -> None:
        if not self._is_cut():
            end.process.do(lambda: self._deliver(end))

    def _deliver(self, end: End) -> None:
        """Deliver the first message that has arrived; each arrival delivers one, in order."""
        if not end.coming or not end.is_open:
            return
        message = end.coming.popleft()
        if isinstance(message, HangUp):
            self._break(end)
        else:
            end.has_replied = True
            end.receive(message)

    def _is_cut(self) -> bool:
        return not self.is_local and self._network.is_cut(*(end.process.name for end in self.ends))

    def _break(self, end: End) -> None:
        if end.is_open and end.coming and end is self.ends[1]:
            self.read_to_end(end)
        if end.is_open:
            self.close(end)
            end.broken()

    # --- silence ---

    def troubled(self) -> None:
        """Watch the ends for silence, as an end is paused or the network is cut."""
        if self._watched:
            return
        self._watched = True
        self._clock.later(SILENCE_S / 4, self._look)

    def _look(self) -> None:
        self._watched = False
        if self.is_over:
            return
        troubled = False
        for end in self.ends:
            silent_s = self._silent_s(end)
            troubled |= silent_s > 0.0
            if silent_s >= SILENCE_S and end.process.paused_since_s is None and end.is_open:
                self._break(end)
        if troubled:
            self.troubled()

    def _silent_s(self, end: End) -> float:
        """Return the time for which no message can have reached this end."""
        names = [each.process.name for each in self.ends]
        since_s = [None if self.is_local else self._network.cut_since_s(*names)]
        since_s.append(self.other(end).process.paused_since_s)
        begun_s = [each for each in since_s if each is not None]
        return max((self._clock.now_s - each for each in begun_s), default=0.0)

    def mended(self) -> None:
        """Deliver the messages that the cut network has held back."""
        for end in self.ends:
            for _ in range(len(end.coming)):
                delay_s = self._clock.random.random() * 0.2
                self._clock.later(delay_s, lambda end=end: self._arrive(end))
