"""Choice of servers for segments."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from shoal_server.core.publications.limits import (
    DURABLE_LOST_AFTER_S,
    LOST_AFTER_S,
    REPLACED_AFTER_S,
)
from shoal_server.core.publications.records import PublishedSegment, PublishedVersion


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A registered parameter server."""

    server_id: str
    incarnation: str
    host: str = ""
    is_leaving: bool = False
    """True if the server is to leave: it gets segments only if all servers are to leave."""


def servers_for(
    rank: int, copies: int, servers: Iterable[StoreServer], near: str = ""
) -> list[str]:
    """Ids of `copies` servers for a rank's segment, or of all that may get it if there are fewer.

    If possible, the first is on host `near`, and the second on another host than the first. The
    first passes the segment on. Ranks begin at different servers, to spread segments.
    """
    by_id = sorted(servers, key=lambda each: each.server_id)
    candidates = [each for each in by_id if not each.is_leaving] or by_id
    if not candidates:
        return []
    rotated = candidates[rank % len(candidates) :] + candidates[: rank % len(candidates)]
    first = next((each for each in rotated if near and each.host == near), rotated[0])
    others = sorted((e for e in rotated if e is not first), key=lambda e: e.host == first.host)
    return [each.server_id for each in [first, *others][:copies]]


def further_servers(first: str, copies: int, servers: Iterable[StoreServer]) -> list[str]:
    """Ids of the servers to which `first` passes its segment on: at most `copies` - 1, none
    leaving.

    Servers on other hosts come first; otherwise they are ordered by id, beginning after `first`.
    """
    by_id = sorted(servers, key=lambda each: each.server_id)
    host = next((each.host for each in by_id if each.server_id == first), "")
    others = [each for each in by_id if each.server_id != first and not each.is_leaving]
    later = [each for each in others if each.server_id > first]
    rotated = later + others[: len(others) - len(later)]
    rotated.sort(key=lambda each: each.host == host)
    return [each.server_id for each in rotated[: copies - 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsAnswer:
    """Answer of a server about segments."""

    held: Collection[bytes]
    """Digests of segments."""
    durable: Collection[bytes] = ()
    """Digests of segments on its disk."""
    writes_to_disk: bool = False


class _Standing(Enum):
    HELD = "the server has the segment"
    UNKNOWN = "the server was not asked yet"
    LACKING = "the server does not have the segment"
    AWAY = "the server is not registered"


class Holders:
    """A leader's knowledge of the holders of a series."""

    def __init__(self) -> None:
        self._servers: dict[str, StoreServer] = {}
        self._away_since_s: dict[str, float] = {}
        self._answers: dict[tuple[str, bytes], tuple[str, bool]] = {}
        """Answers by server and digest: the server's process, and True if it had the segment."""
        self._durable: set[tuple[str, bytes]] = set()
        self._write_to_disk: set[str] = set()
        self._missing_since_s: dict[bytes, float] = {}

    def note_registered(
        self, servers: Iterable[StoreServer], versions: Iterable[PublishedVersion], now_s: float
    ) -> None:
        """Replace the registered servers, and note since when holders of `versions` are absent."""
        self._servers = {each.server_id: each for each in servers}
        named = {h for v in versions for s in v.segments for h in s.holders}
        self._away_since_s = {
            each: self._away_since_s.get(each, now_s) for each in named - self._servers.keys()
        }

    def note(self, server: StoreServer, asked: Iterable[bytes], answer: HoldsAnswer) -> None:
        for digest in asked:
            self._answers[server.server_id, digest] = (server.incarnation, digest in answer.held)
            # The server's disk may have been replaced.
            self._durable.discard((server.server_id, digest))
        self._durable.update((server.server_id, digest) for digest in answer.durable)
        if answer.writes_to_disk:
            self._write_to_disk.add(server.server_id)

    def note_versions(self, versions: Iterable[PublishedVersion], now_s: float) -> None:
        """Note since when segments are missing; forget dropped versions."""
        holders: dict[bytes, set[str]] = defaultdict(set)
        for version in versions:
            for segment in version.segments:
                holders[segment.digest].update(segment.holders)
        self._answers = {k: a for k, a in self._answers.items() if k[1] in holders}
        self._durable = {each for each in self._durable if each[1] in holders}
        missing = [d for d, named in holders.items() if self._is_missing(d, named)]
        self._missing_since_s = {d: self._missing_since_s.get(d, now_s) for d in missing}

    def questions(self, versions: Iterable[PublishedVersion]) -> dict[str, list[bytes]]:
        """Digests to ask each holder about: those that it is not known to have. A holder that
        writes to disk is also asked about versions that are not durable."""
        asked = (_Standing.UNKNOWN, _Standing.LACKING)
        digests_of: dict[str, list[bytes]] = defaultdict(list)
        for version in versions:
            for segment in version.segments:
                for holder in segment.holders:
                    is_to_be_written = holder in self._write_to_disk and not version.is_durable
                    if is_to_be_written or self._standing(holder, segment.digest) in asked:
                        digests_of[holder].append(segment.digest)
        return {server: list(dict.fromkeys(digests)) for server, digests in digests_of.items()}

    def durable(self, versions: Iterable[PublishedVersion]) -> list[int]:
        """Versions on the disks of all their holders, and not marked as durable yet."""
        return [
            version.number
            for version in versions
            if not version.is_durable
            and all((h, s.digest) in self._durable for s in version.segments for h in s.holders)
        ]

    def lost(self, versions: Iterable[PublishedVersion], now_s: float) -> list[int]:
        """Versions with a segment that no holder has had for LOST_AFTER_S (DURABLE_LOST_AFTER_S if
        durable)."""
        return [
            version.number
            for version in versions
            if any(
                now_s - self._missing_since_s.get(segment.digest, now_s)
                >= (DURABLE_LOST_AFTER_S if version.is_durable else LOST_AFTER_S)
                for segment in version.segments
            )
        ]

    def replaced(
        self, version: PublishedVersion, copies: int, now_s: float
    ) -> PublishedVersion | None:
        """Replace holders that are gone or leaving, up to `copies` for each segment; None if
        nothing changes."""
        segments = [self._replaced(segment, copies, now_s) for segment in version.segments]
        if segments == list(version.segments):
            return None
        return replace(version, segments=tuple(segments))

    def _replaced(self, segment: PublishedSegment, copies: int, now_s: float) -> PublishedSegment:
        standing = {h: self._standing(h, segment.digest) for h in segment.holders}
        having = {h for h in self._servers if self._standing(h, segment.digest) is _Standing.HELD}
        if not having and _Standing.UNKNOWN not in standing.values():
            return segment  # no registered server has it
        gone = {h for h in standing if self._is_gone(h, now_s)}
        staying = [h for h in segment.holders if h not in gone]
        counted = [h for h in staying if not self._is_leaving(h)]
        if len(counted) < len(staying):
            # A leaving server does not wait for one that is away, and may have the only copy.
            counted = [h for h in counted if h in self._servers]
        candidates = [
            server
            for server_id, server in sorted(self._servers.items())
            if not server.is_leaving and server_id not in staying
        ]
        ordered = sorted(self._least_loaded(candidates), key=lambda each: each not in having)
        further = ordered[: max(copies - len(counted), 0)]
        if not further and not staying:
            return segment
        # A leaving server is dropped once the others have the segment.
        if len(counted) >= copies and all(standing[h] is _Standing.HELD for h in counted):
            staying = counted
        return replace(segment, holders=(*staying, *further))

    def _is_gone(self, holder: str, now_s: float) -> bool:
        since_s = self._away_since_s.get(holder)
        return since_s is not None and now_s - since_s >= REPLACED_AFTER_S

    def _is_leaving(self, holder: str) -> bool:
        server = self._servers.get(holder)
        return server is not None and server.is_leaving

    def _least_loaded(self, candidates: Sequence[StoreServer]) -> list[str]:
        loads: dict[str, int] = defaultdict(int)
        for (server_id, _), (_, has) in self._answers.items():
            loads[server_id] += has
        return sorted((c.server_id for c in candidates), key=lambda each: (loads[each], each))

    def _is_missing(self, digest: bytes, holders: Iterable[str]) -> bool:
        return not any(self._may_have(holder, digest) for holder in holders)

    def _may_have(self, holder: str, digest: bytes) -> bool:
        standing = self._standing(holder, digest)
        if standing is _Standing.LACKING:
            # It reads the segment from its disk.
            return (holder, digest) in self._durable
        return standing is not _Standing.AWAY

    def _standing(self, holder: str, digest: bytes) -> _Standing:
        server = self._servers.get(holder)
        if server is None:
            return _Standing.AWAY
        incarnation, has = self._answers.get((holder, digest), ("", False))
        if incarnation != server.incarnation:
            return _Standing.UNKNOWN
        return _Standing.HELD if has else _Standing.LACKING


def verified(
    segments: Sequence[PublishedSegment], held: Mapping[str, Collection[bytes]]
) -> tuple[PublishedSegment, ...] | int:
    """Return the segments with their confirmed holders; or the rank of the first segment without
    any."""
    answered = []
    for rank, segment in enumerate(segments):
        holders = tuple(h for h in segment.holders if segment.digest in held.get(h, ()))
        if not holders:
            return rank
        answered.append(replace(segment, holders=holders))
    return tuple(answered)
