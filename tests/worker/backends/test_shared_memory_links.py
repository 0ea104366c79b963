"""Ranks of one machine tell each other by their connections whether they leave or are lost."""

import socket
import threading
from dataclasses import dataclass, field

from shoal.backends.shared_memory.links import PeerSockets


class WaitsToSend(socket.socket):
    """Sends only once somebody has tried to close it, or is held up in doing so."""

    def __init__(self, plain: socket.socket) -> None:
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        self._closing = threading.Event()

    def close(self) -> None:
        super().close()
        self._closing.set()

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        self._closing.wait(0.5)
        return super().send(data, flags)


@dataclass
class Rank:
    """What one is told."""

    reasons: list[str] = field(default_factory=list)
    links: PeerSockets | None = None

    def lose(self, reason: str) -> None:
        self.reasons.append(reason)


def test_all_are_told_that_a_rank_leaves_however_fast_one_of_them_goes_on() -> None:
    """The first that hears of it closes its connection, which ends the watch of rank 0."""
    first, second = socket.socketpair(), socket.socketpair()
    leaving, others = Rank(), (Rank(), Rank())
    for rank, (_, own) in zip(others, (first, second), strict=True):
        rank.links = PeerSockets([own], rank.lose)
    leaving.links = PeerSockets([first[0], WaitsToSend(second[0])], leaving.lose)
    watching = [each for each in threading.enumerate() if each.name == "shoal-links"]
    leaving.links.close()
    for thread in watching:
        thread.join(30)
    assert [rank.reasons for rank in others] == [[], []]
