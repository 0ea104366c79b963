"""Watch on the primaries of this server's copies: finds primaries that do not answer."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.effects import Effect, LogLine, ProbePeer
from shoal_server.core.replication.protocol.messages import Key


@dataclass(slots=True)
class _Silent:
    """A primary that has no open link to this server, and is probed instead."""

    again_s: float = inf
    """Next probe; infinite while an answer is awaited."""
    is_dead: bool = False
    """True if the last probe got no answer, and no link was opened since."""


class PrimaryWatch:
    def __init__(self, probe_s: float) -> None:
        self._probe_s = probe_s
        self._incoming_links: defaultdict[Holder, set[int]] = defaultdict(set)
        self._backed: defaultdict[Holder, set[Key]] = defaultdict(set)
        """Shards with a copy in step here, by primary."""
        self._silent: dict[Holder, _Silent] = {}

    def record_link(self, peer: Holder, link: int) -> None:
        self._incoming_links[peer].add(link)
        self._silent.pop(peer, None)

    def remove_link(self, peer: Holder, link: int) -> Iterator[Effect]:
        self._incoming_links[peer].discard(link)
        if not self._incoming_links[peer]:
            del self._incoming_links[peer]
        yield from self._probe_if_silent(peer)

    def has_link(self, peer: Holder, link: int) -> bool:
        return link in self._incoming_links.get(peer, ())

    def open_links(self, peer: Holder) -> list[int]:
        return sorted(self._incoming_links.get(peer, ()))

    def watch_primary(self, key: Key, primary: Holder) -> Iterator[Effect]:
        """Watch the primary: this server may take over the shard from it."""
        self._backed[primary].add(key)
        yield from self._probe_if_silent(primary)

    def stop_watching(self, key: Key, primary: Holder) -> None:
        keys = self._backed.get(primary)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self._backed[primary]
                self._silent.pop(primary, None)

    def _probe_if_silent(self, peer: Holder) -> Iterator[Effect]:
        if peer in self._backed and peer not in self._incoming_links and peer not in self._silent:
            self._silent[peer] = _Silent()
            yield ProbePeer(peer)

    def record_probe(self, peer: Holder, answers: bool, now_s: float) -> Iterator[Effect]:
        silent = self._silent.get(peer)
        if silent is None:
            return
        if not answers and not silent.is_dead:
            yield LogLine("primary_lost", peer=peer)
        silent.is_dead = not answers
        silent.again_s = now_s + self._probe_s

    def is_dead(self, peer: Holder) -> bool:
        silent = self._silent.get(peer)
        return silent is not None and silent.is_dead

    def watched_shards(self, peer: Holder) -> list[Key]:
        return sorted(self._backed.get(peer, ()))

    @property
    def wakes_s(self) -> float:
        return min((silent.again_s for silent in self._silent.values()), default=inf)

    def due_probes(self, now_s: float) -> Iterator[Effect]:
        for peer, silent in self._silent.items():
            if silent.again_s <= now_s:
                silent.again_s = inf
                yield ProbePeer(peer)
