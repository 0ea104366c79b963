"""Decisions on the segments that this server holds: which are admitted, held and freed. The caller
frees the returned segments."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal_proto.errors import Overloaded, StaleEpoch
from shoal_proto.segments.sealed import Segment

GRACE_S = 120.0
"""Grace period. It starts again with each put, which a rank repeats at shorter intervals until its
publication is over, and with each `renew_all`, which a coordinator repeats during a cut."""
MAX_UNDECIDED = 2
"""Bound on one rank's segments that no version has named yet: of the publication in progress, and
of one that may never be complete."""


Position = tuple[int, int]
"""Epoch and publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOrigin:
    """The publication for which a segment was put."""

    epoch: int
    publication: int
    rank: int

    @property
    def position(self) -> "Position":
        return self.epoch, self.publication


@dataclass(slots=True, kw_only=True)
class HeldSegment:
    """A segment in this server's memory."""

    series: str
    segment: Segment
    origin: SegmentOrigin | None
    """Publication for which the segment was put here; None: copied from another server, or read
    from disk."""
    needed_s: float
    """Time of the last put, or of the last record that named the segment."""
    num_transfers: int = 0
    """Transfers to other servers in progress, during which the grace period does not end."""
    was_named: bool = False
    """True once the version of the origin's publication, or a later one, has named the segment."""


@dataclass(slots=True)
class _Series:
    newest: Position = (0, 0)
    """Epoch of the series, and the newest publication committed in it."""
    named: Mapping[bytes, Position] = field(default_factory=dict)
    """Newest publication that names each digest."""
    held: dict[bytes, HeldSegment] = field(default_factory=dict)


class SegmentStore:
    """Segments by series and digest. `now_s` is any clock that only rises."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = defaultdict(_Series)

    def get(self, series: str, digest: bytes) -> Segment | None:
        """Return a held segment, or None."""
        known = self._series.get(series)
        held = known.held.get(digest) if known is not None else None
        return None if held is None else held.segment

    def admit(self, series: str, digest: bytes, origin: SegmentOrigin) -> None:
        """Admit a segment for a publication. Raises StaleEpoch if the series has a later epoch, and
        Overloaded if the rank has put MAX_UNDECIDED other segments."""
        known = self._series.get(series)
        if known is None:
            return
        if origin.epoch < known.newest[0]:
            raise StaleEpoch(
                f"series {series} is published by another publisher now",
                seen=f"a segment of epoch {origin.epoch}",
                expected=f"epoch {known.newest[0]}",
                fix="Begin again: the newest generation of the job publishes.",
            )
        undecided = [
            held.origin.publication
            for other, held in known.held.items()
            if other != digest
            and held.origin is not None
            and held.origin.rank == origin.rank
            and not held.was_named
            # A kept version has the same bytes: they are held in any case.
            and other not in known.named
        ]
        if len(undecided) >= MAX_UNDECIDED:
            raise Overloaded(
                f"rank {origin.rank} publishes {series} faster than versions are committed",
                seen=f"segments of publications {sorted(undecided)}, which no version names yet",
                expected=f"fewer than {MAX_UNDECIDED} such segments, before one of publication"
                f" {origin.publication} is put",
                fix="Publish again once they are committed; abandoned segments are freed after"
                f" {GRACE_S:g} s.",
            )

    def insert(
        self, series: str, segment: Segment, origin: SegmentOrigin | None, now_s: float
    ) -> bool:
        """Hold a segment. False if it was held already; its grace period starts again."""
        known = self._series[series]
        held = known.held.get(segment.digest)
        if held is not None:
            held.needed_s = now_s
            held.origin = origin or held.origin
            held.was_named = _is_named(held, known.named)
            return False
        held = HeldSegment(series=series, segment=segment, origin=origin, needed_s=now_s)
        held.was_named = _is_named(held, known.named)
        known.held[segment.digest] = held
        return True

    def renew(
        self, series: str, digest: bytes, origin: SegmentOrigin, now_s: float
    ) -> Segment | None:
        """Return the segment, and start its grace period again; None if it is not held."""
        segment = self.get(series, digest)
        if segment is not None:
            self.insert(series, segment, origin, now_s)
        return segment

    @contextmanager
    def sending(self, series: str, digest: bytes, now_s: Callable[[], float]) -> Iterator[None]:
        """Keep a segment beyond its grace period within a block, which sends it to another server.
        Its grace period starts again at the end."""
        known = self._series.get(series)
        held = known.held.get(digest) if known is not None else None
        if held is None:
            yield  # it was abandoned
            return
        held.num_transfers += 1
        try:
            yield
        finally:
            held.num_transfers -= 1
            held.needed_s = now_s()

    def renew_all(self, series: str, position: Position, now_s: float) -> None:
        """Start the grace period of all segments of a publication again."""
        known = self._series.get(series)
        for held in known.held.values() if known is not None else ():
            if held.origin is not None and held.origin.position == position:
                held.needed_s = now_s

    def follow(
        self, series: str, newest: Position, named: Mapping[bytes, Position], now_s: float
    ) -> list[Segment]:
        """Update a series from its records; return the segments that are no longer held.

        `newest`: the series' epoch, and the newest publication committed in it. `named`: the
        digests that its versions name, each with its newest publication. A segment that is not
        named is released at once if it was named before, or if its publication or a later one was
        committed.
        """
        known = self._series[series]
        known.newest, known.named = newest, named
        released = []
        for digest, held in list(known.held.items()):
            origin = held.origin
            held.was_named = held.was_named or _is_named(held, named)
            if digest in named:
                held.needed_s = now_s
            elif held.was_named or (origin is not None and origin.position <= newest):
                released.append(known.held.pop(digest).segment)
        return released

    def forget(self, series: str) -> list[Segment]:
        """Note that all records of a series were deleted; return the segments that are no longer
        held. Segments never named stay for their grace period."""
        known = self._series.pop(series, None)
        if known is None:
            return []
        remaining = {d: h for d, h in known.held.items() if not h.was_named}
        if remaining:
            self._series[series].held = remaining
        return [held.segment for digest, held in known.held.items() if digest not in remaining]

    def abandon(
        self, series: str, rank: int, epoch: int, publications: frozenset[int]
    ) -> list[Segment]:
        """Release and return a rank's segments for these abandoned publications, unless a version
        names them."""
        known = self._series.get(series)
        released: list[Segment] = []
        for digest, held in list(known.held.items()) if known is not None else ():
            origin = held.origin
            if origin is None or held.was_named or (origin.rank, origin.epoch) != (rank, epoch):
                continue
            if known is not None and digest in known.named:
                continue  # an earlier version has the same bytes
            if origin.publication in publications:
                assert known is not None
                released.append(known.held.pop(digest).segment)
        return released

    def sweep(self, now_s: float) -> list[HeldSegment]:
        """Release and return the segments beyond their grace period."""
        released = []
        for series, known in list(self._series.items()):
            for digest, held in list(known.held.items()):
                is_needed = digest in known.named or held.num_transfers
                if not is_needed and now_s - held.needed_s >= GRACE_S:
                    released.append(known.held.pop(digest))
            if not known.held and not known.named and known.newest == (0, 0):
                del self._series[series]
        return released

    def held(self) -> Iterator[HeldSegment]:
        """Yield all held segments."""
        for known in self._series.values():
            yield from known.held.values()


def _is_named(held: HeldSegment, named: Mapping[bytes, Position]) -> bool:
    position = named.get(held.segment.digest)
    return position is not None and (held.origin is None or held.origin.position <= position)
