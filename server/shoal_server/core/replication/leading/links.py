"""Links from this server to servers that are to have copies."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf

from shoal_server.core.processes import Holder
from shoal_server.core.replication.leading.outgoing_images import OutgoingImages
from shoal_server.core.replication.protocol.effects import Effect, OpenLink
from shoal_server.core.replication.protocol.events import LinkBroken
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import Key


class LinkPhase(Enum):
    OPENING = "the link is being opened"
    OPEN = "messages sent over the link arrive, or it breaks"
    BROKEN = "the link is opened again a little later"


@dataclass(slots=True)
class Link:
    number: int
    images: OutgoingImages
    phase: LinkPhase = LinkPhase.OPENING
    give_up_s: float = inf
    """Time from which another break gives the peer up; infinite if the link has not broken since
    the last reply."""
    again_s: float = inf


class ReplicationLinks:
    def __init__(self, limits: ReplicationLimits) -> None:
        self._limits = limits
        self._links: dict[Holder, Link] = {}
        self._used: defaultdict[Holder, set[Key]] = defaultdict(set)
        self._last = 0

    def add_use(self, peer: Holder, key: Key) -> Iterator[Effect]:
        self._used[peer].add(key)
        yield from self.connect(peer)

    def is_used(self, peer: Holder, key: Key) -> bool:
        return key in self._used.get(peer, ())

    def remove_use(self, peer: Holder, key: Key) -> Iterator[Effect]:
        self._used[peer].discard(key)
        link = self._links.get(peer)
        if link is not None:
            yield from link.images.drop(key)

    def connect(self, peer: Holder) -> Iterator[Effect]:
        """Open a link, unless there is one. A link that is opened early saves later pushes the
        wait."""
        if peer not in self._links:
            limits = self._limits
            images = OutgoingImages(limits.window_chunks, limits.transfer_attempts)
            self._links[peer] = Link(0, images)
            yield self._opened_anew(peer)

    def _opened_anew(self, peer: Holder) -> Effect:
        link = self._links[peer]
        self._last += 1
        link.number, link.phase, link.again_s = self._last, LinkPhase.OPENING, inf
        return OpenLink(peer, link.number)

    def find(self, peer: Holder) -> Link | None:
        return self._links.get(peer)

    def opened(self, peer: Holder) -> Link | None:
        """The link, or None if it is not open."""
        link = self._links.get(peer)
        return link if link is not None and link.phase is LinkPhase.OPEN else None

    def is_current(self, peer: Holder, number: int) -> bool:
        link = self._links.get(peer)
        return link is not None and link.number == number

    def keys(self, peer: Holder) -> list[Key]:
        return sorted(self._used[peer])

    def mark_open(self, peer: Holder) -> None:
        self._links[peer].phase = LinkPhase.OPEN

    def record_link_break(self, event: LinkBroken, now_s: float) -> bool:
        """Note a break; True if the peer is given up."""
        link, limits = self._links[event.peer], self._limits
        if event.has_replied or link.give_up_s == inf:
            link.give_up_s = now_s + limits.reconnect_s
        if event.is_gone or now_s >= link.give_up_s:
            return True
        link.phase, link.again_s = LinkPhase.BROKEN, now_s + limits.reconnect_s / 10
        return False

    def note_reply(self, peer: Holder) -> None:
        """Note a reply: after a later break there is the full time to reconnect."""
        self._links[peer].give_up_s = inf

    def end(self, peer: Holder) -> Iterator[Effect]:
        link = self._links.pop(peer)
        yield from link.images.clear()

    @property
    def wakes_s(self) -> float:
        return min((link.again_s for link in self._links.values()), default=inf)

    def reopen_due(self, now_s: float) -> Iterator[Effect]:
        for peer, link in list(self._links.items()):
            if link.again_s <= now_s:
                yield self._opened_anew(peer)
