"""A series of published weights as stored in etcd: its head, and a record of each kept version."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

DEFAULT_KEEP = 2
DEFAULT_COPIES = 2
DIGESTS_KEPT = 64
"""Number of versions, kept or dropped, whose digests a head has: to check readers' reports."""
LOSSES_KEPT = 16


@dataclass(frozen=True, slots=True)
class Publisher:
    """The sender of versions: a generation of the series' job, or one process of a plain script."""

    generation: int = 0
    script: str = ""
    """Public id of the process; empty for a member of the job."""

    def __str__(self) -> str:
        return f"script process {self.script}" if self.script else f"generation {self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSegment:
    """The bytes of a version from one rank."""

    digest: bytes
    num_bytes: int
    holders: tuple[str, ...] = ()
    """Ids of the parameter servers that are to hold the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """An immutable version. Only the holders, `is_pinned` and `is_durable` change."""

    number: int
    epoch: int
    publication: int
    """Number of the publication within its epoch; 0 for a rollback."""
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
        """SHA-256 over the digests of layout and segments. Versions of equal bytes have the same
        digest."""
        return content_digest(self.layout_digest, (s.digest for s in self.segments))

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


def content_digest(layout_digest: bytes, segments: Iterable[bytes]) -> bytes:
    """Digest of a version's content, which readers report as installed."""
    return hashlib.sha256(layout_digest + b"".join(segments)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesHead:
    """The record that decides which versions exist. Replaced by compare-and-swap."""

    epoch: int = 0
    """Rises with each change of the publisher; 0: there has been no publisher yet."""
    publisher: Publisher = Publisher()
    number: int = 0
    """Number of the newest version that was ever committed; 0: none."""
    publication: int = 0
    """The newest publication that was committed in this epoch; 0: none."""
    kept: tuple[int, ...] = ()
    """Numbers of the versions that exist, ascending."""
    keep: int = DEFAULT_KEEP
    """Number of versions to keep: the newest version, leased versions, and then the next newest.
    Pinned versions are kept in addition."""
    copies: int = DEFAULT_COPIES
    """Number of servers that are to hold each segment."""
    digests: Mapping[int, bytes] = field(default_factory=dict)
    """Digests of the newest versions by number, dropped ones included."""
    lost: tuple[int, ...] = ()
    """The newest versions that were dropped because no server had them."""
    num_writes: int = 0
    """Rises with each write, so that no two heads are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSeries:
    """A head, and the versions that it names."""

    head: SeriesHead = SeriesHead()
    versions: Mapping[int, PublishedVersion] = field(default_factory=dict)
