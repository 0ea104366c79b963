"""The segments that this server holds, and which of them may go. Decides; does no I/O.

A segment stays while a version of its series names it. One that no version has named yet may still
become part of one: it stays for a grace period. The caller frees what is given back.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal_proto.errors import Overloaded, StaleEpoch
from shoal_proto.segments.sealed import Segment

GRACE_S = 120.0
"""How long a segment is held that no version names: longer than any publication takes to be
committed, or to be given up."""
MAX_UNDECIDED = 2
"""Publications of one rank of which it is not known whether they became a version: the one on its
way, and one whose record has not arrived here yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The publication for which a segment was put."""

    epoch: int
    publication: int
    rank: int


@dataclass(slots=True, kw_only=True)
class Held:
    """A segment in this server's memory."""

    series: str
    segment: Segment
    origin: Origin | None
    """None: it was copied here on the coordinator's order."""
    needed_s: float
    """When it was put last, or named last."""
    was_named: bool = False
    """True once a version has named it."""


@dataclass(slots=True)
class _Series:
    """One series as its records in etcd have it, and what is held of it."""

    epoch: int
    named: frozenset[bytes]
    held: dict[bytes, Held]


class SegmentStore:
    """Segments by series and digest. `now_s` is any clock that only rises."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = defaultdict(lambda: _Series(0, frozenset(), {}))

    def get(self, series: str, digest: bytes) -> Segment | None:
        """The segment, if it is held."""
        known = self._series.get(series)
        held = known.held.get(digest) if known is not None else None
        return None if held is None else held.segment

    def admit(self, series: str, digest: bytes, origin: Origin) -> None:
        """Let a segment come in for a publication.

        Raises StaleEpoch if the series has gone on to a later epoch, and Overloaded if too many
        publications of the rank are undecided.
        """
        known = self._series.get(series)
        if known is None:
            return
        if origin.epoch < known.epoch:
            raise StaleEpoch(
                f"series {series} is published by another publisher now",
                seen=f"a segment of epoch {origin.epoch}",
                expected=f"epoch {known.epoch}",
                fix="Begin again: the newest generation of the job publishes.",
            )
        undecided = {
            held.origin.publication
            for other, held in known.held.items()
            if other != digest
            and held.origin is not None
            and held.origin.rank == origin.rank
            and held.origin.publication != origin.publication
            and not held.was_named
        }
        if len(undecided) >= MAX_UNDECIDED:
            raise Overloaded(
                f"rank {origin.rank} publishes {series} faster than versions are committed",
                seen=f"publications {sorted(undecided)} undecided",
                expected=f"fewer than {MAX_UNDECIDED} beside publication {origin.publication}",
                fix="Publish again once they are committed; what was given up is freed after"
                f" {GRACE_S:g} s.",
            )

    def insert(self, series: str, segment: Segment, origin: Origin | None, now_s: float) -> bool:
        """Hold a segment, or hold it for longer; False if it was held before."""
        known = self._series[series]
        held = known.held.get(segment.digest)
        if held is not None:
            held.needed_s = now_s
            held.origin = origin or held.origin
            return False
        known.held[segment.digest] = Held(
            series=series,
            segment=segment,
            origin=origin,
            needed_s=now_s,
            was_named=segment.digest in known.named,
        )
        return True

    def renew(self, series: str, digest: bytes, origin: Origin, now_s: float) -> Segment | None:
        """The segment if it is held, then for longer, and for this publication."""
        segment = self.get(series, digest)
        if segment is not None:
            self.insert(series, segment, origin, now_s)
        return segment

    def follow(
        self, series: str, epoch: int, named: frozenset[bytes], now_s: float
    ) -> list[Segment]:
        """Take in a series as its records have it; the segments that are not held any more.

        `named`: digests that its versions name. A segment that was named and is not any more goes
        at once, and so does one of an earlier epoch that was never named: it cannot be committed.
        """
        known = self._series[series]
        known.epoch, known.named = max(epoch, known.epoch), named
        gone = []
        for digest, held in list(known.held.items()):
            if digest in named:
                held.was_named, held.needed_s = True, now_s
            elif held.was_named or (held.origin is not None and held.origin.epoch < known.epoch):
                gone.append(known.held.pop(digest).segment)
        return gone

    def forget(self, series: str) -> list[Segment]:
        """Take in that a series has no records any more; the segments that are not held any more.

        A segment of a series that never had a record stays for its grace period.
        """
        known = self._series.pop(series, None)
        if known is None:
            return []
        left = {d: h for d, h in known.held.items() if not h.was_named}
        if left:
            self._series[series].held = left
        return [held.segment for digest, held in known.held.items() if digest not in left]

    def abandon(
        self, series: str, rank: int, epoch: int, publications: frozenset[int]
    ) -> list[Segment]:
        """Give up what a rank put for publications that it knows to be refused; the segments that
        are not held any more."""
        known = self._series.get(series)
        gone: list[Segment] = []
        for digest, held in list(known.held.items()) if known is not None else ():
            origin = held.origin
            if origin is None or held.was_named or (origin.rank, origin.epoch) != (rank, epoch):
                continue
            if origin.publication in publications:
                assert known is not None
                gone.append(known.held.pop(digest).segment)
        return gone

    def sweep(self, now_s: float) -> list[Held]:
        """Give up what no version has named for the grace period; what is not held any more."""
        gone = []
        for series, known in list(self._series.items()):
            for digest, held in list(known.held.items()):
                if digest not in known.named and now_s - held.needed_s >= GRACE_S:
                    gone.append(known.held.pop(digest))
            if not known.held and not known.epoch and not known.named:
                del self._series[series]
        return gone

    def held(self) -> Iterator[Held]:
        """All that is held."""
        for known in self._series.values():
            yield from known.held.values()

    @property
    def held_bytes(self) -> Mapping[str, int]:
        """By series."""
        return {
            series: sum(held.segment.num_bytes for held in known.held.values())
            for series, known in self._series.items()
            if known.held
        }
