"""Ranks of one machine learn from each other's connections if a peer leaves or is lost."""

import socket
import threading
from dataclasses import dataclass, field

from shoal.backends.shared_memory.links import PeerSockets


class WaitsToSend(socket.socket):
    """A socket that sends only once its close was attempted, or after half a second."""

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
    """A rank that records the reasons of its losses."""

    reasons: list[str] = field(default_factory=list)
    links: PeerSockets | None = None

    def lose(self, reason: str) -> None:
        self.reasons.append(reason)


def test_a_rank_that_leaves_counts_as_lost_nowhere_though_a_peer_hangs_up_first() -> None:
    """The first rank that learns of it closes its connection, which ends the watch of rank 0."""
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
