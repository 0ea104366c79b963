"""A publication in progress: the parts that ranks have contributed."""

import hashlib
from enum import Enum

from shoal_proto.short_lists import short_list
from shoal_server.core.publications.protocol import Call, PublicationPart


class PublicationStage(Enum):
    GATHERING = "parts are missing"
    VERIFYING = "the parts are being verified"
    COMMITTING = "its record is being written, or about to be"


class Mismatch(Exception):
    """Raised for a part that contradicts an earlier part."""

    def __init__(self, what: str, seen: str, expected: str) -> None:
        super().__init__(what)
        self.what, self.seen, self.expected = what, seen, expected


class Publication:
    def __init__(self, number: int, now_s: float) -> None:
        self.number = number
        self.stage = PublicationStage.GATHERING
        self.received_s = now_s
        """Arrival of the newest part. A part that is sent again unchanged does not count."""
        self._parts: dict[int, PublicationPart] = {}
        self._calls: dict[Call, int] = {}

    @property
    def calls(self) -> list[Call]:
        return list(self._calls)

    @property
    def parts(self) -> tuple[PublicationPart, ...]:
        return tuple(part for _, part in sorted(self._parts.items()))

    @property
    def is_complete(self) -> bool:
        return bool(self._parts) and len(self._parts) == next(iter(self._parts.values())).world

    @property
    def missing(self) -> str:
        """The first 8 ranks without a part, as text, and how many more there are. Empty if no part
        has arrived, or none is missing."""
        world = next(iter(self._parts.values())).world if self._parts else 0
        return short_list((str(rank) for rank in range(world) if rank not in self._parts), 8)

    def add(self, call: Call, part: PublicationPart, now_s: float) -> None:
        """Add a rank's part, and the call that waits for the version. A rank may replace its part
        until verification begins.

        Raises Mismatch, and then changes nothing.
        """
        known = self._parts.get(part.rank)
        is_verified = known is not None and self.stage is not PublicationStage.GATHERING
        if known is not None and is_verified and not _is_same(known, part):
            raise Mismatch(
                f"rank {part.rank} sends another part of publication {self.number}",
                seen=f"segment {part.segment.digest.hex()[:12]}",
                expected=f"segment {known.segment.digest.hex()[:12]}, as before",
            )
        others = (each for rank, each in self._parts.items() if rank != part.rank)
        if (other := next(others, None)) is not None:
            for name, seen, expected in (
                ("number of ranks", part.world, other.world),
                ("step", part.step, other.step),
                ("cut of the tables", _shown(part.tables_cut), _shown(other.tables_cut)),
            ):
                if seen != expected:
                    raise Mismatch(
                        f"ranks disagree on the {name} of publication {self.number}",
                        seen=f"{seen} on rank {part.rank}",
                        expected=f"{expected}, as on rank {other.rank}",
                    )
        if known is None or not _is_same(known, part):
            self.received_s = now_s
        self._parts[part.rank] = part
        self._calls[call] = part.rank

    def drop_call(self, call: Call) -> None:
        self._calls.pop(call, None)


def _shown(cut: bytes) -> str:
    return hashlib.sha256(cut).hexdigest()[:12] if cut else "none"


def _is_same(one: PublicationPart, other: PublicationPart) -> bool:
    identity = one.segment.digest, one.layout_key, one.step, one.world, one.tables_cut
    return identity == (
        other.segment.digest,
        other.layout_key,
        other.step,
        other.world,
        other.tables_cut,
    )
