"""A series as stored in etcd: a head, and a record of each kept version."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

DEFAULT_KEEP = 2
DEFAULT_COPIES = 2
DIGESTS_KEPT = 64
"""Number of newest versions, dropped ones included, whose digests the head has."""
LOSSES_KEPT = 16
_FIELD_BYTES, _NUMBER_BYTES, _FIXED_BYTES = 6, 16, 512
"""Upper bounds in a version's record: tag and length of a text, a segment's number with the tag of
the segment, and all fields but metadata and segments."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """The sender of versions: a generation of the job, or the process of a plain script."""

    generation: int = 0
    script: str = ""
    """Public id of the script's process; empty for a generation."""

    def __str__(self) -> str:
        return f"script process {self.script}" if self.script else f"generation {self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSegment:
    """A rank's bytes of a version."""

    digest: bytes
    num_bytes: int
    holders: tuple[str, ...] = ()
    """Servers that are to hold the segment."""

    @property
    def record_bytes(self) -> int:
        """Upper bound on the segment's share of a version's record."""
        texts = (len(self.digest), *map(len, self.holders))
        return sum(texts) + _FIELD_BYTES * len(texts) + _NUMBER_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """An immutable version, except for `holders`, `is_pinned` and `is_durable`."""

    number: int
    epoch: int
    publication: int
    """Number within the epoch; 0 for a rollback."""
    step: int
    layout_digest: bytes
    segments: tuple[PublishedSegment, ...]
    created_unix_s: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    rolled_back_to: int = 0
    is_pinned: bool = False
    is_durable: bool = False
    tables_cut: bytes = b""

    @property
    def digest(self) -> bytes:
        """Equal for versions with the same layout and bytes."""
        return content_digest(self.layout_digest, (s.digest for s in self.segments))

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def record_bytes(self) -> int:
        """Upper bound on the size of this version's record in etcd."""
        texts = (
            len(each.encode()) + _FIELD_BYTES for pair in self.metadata.items() for each in pair
        )
        return _FIXED_BYTES + sum(texts) + sum(segment.record_bytes for segment in self.segments)


def content_digest(layout_digest: bytes, segments: Iterable[bytes]) -> bytes:
    """SHA-256 over the digests of layout and segments."""
    return hashlib.sha256(layout_digest + b"".join(segments)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesHead:
    """The record that decides which versions exist, replaced by compare-and-swap."""

    epoch: int = 0
    """Rises with each change of the publisher; 0: there was none yet."""
    publisher: Publisher = Publisher()
    number: int = 0
    """The newest version ever committed; 0: none."""
    publication: int = 0
    """The newest publication committed in this epoch; 0: none."""
    kept: tuple[int, ...] = ()
    """The kept versions, ascending."""
    keep: int = DEFAULT_KEEP
    """Number of versions to keep, beside pinned ones."""
    copies: int = DEFAULT_COPIES
    """Number of servers to hold each segment."""
    digests: Mapping[int, bytes] = field(default_factory=dict)
    """Digests of the newest versions, dropped ones included."""
    lost: tuple[int, ...] = ()
    """The newest versions dropped because no server had them."""
    num_lost: int = 0
    """Number of versions ever dropped because no server had them."""
    num_writes: int = 0
    """Rises with each write, so that no two heads are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSeries:
    head: SeriesHead = SeriesHead()
    versions: Mapping[int, PublishedVersion] = field(default_factory=dict)
