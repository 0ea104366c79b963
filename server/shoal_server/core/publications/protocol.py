"""Events and effects of a series. A `call` identifies a request and its answer."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from shoal_server.core.publications.records import (
    PublishedSegment,
    PublishedVersion,
    Publisher,
    SeriesHead,
)

Call = Hashable


class PublicationRefusal(Enum):
    """Reasons to refuse a request."""

    SERIES_HELD = "another publisher has the series"
    STALE_EPOCH = "another publisher has replaced the sender"
    LATER_EPOCH = "the sender has an epoch of a later leader"
    ABANDONED = "the publication will not become a version"
    GONE = "the version is not kept"
    OVERLOADED = "a limit is reached"
    INVALID = "the request contradicts what is known"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused:
    """Answer to a refused request."""

    call: Call
    refusal: PublicationRefusal
    what: str
    seen: str = ""
    expected: str = ""


# --- events ---


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRequested:
    """A publisher announces a publication."""

    call: Call
    publisher: Publisher
    known_epoch: int = 0
    """Epoch under which the publisher has published; 0: none yet."""
    keep: int
    copies: int
    is_ending: bool = False
    """True if the publisher releases the series, without a version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationPart:
    """A rank's share of a publication."""

    rank: int
    world: int
    segment: PublishedSegment
    layout: bytes = field(compare=False, repr=False)
    """Encoded layout of the rank."""
    layout_key: bytes
    """Identity of the layout."""
    step: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    tables_cut: bytes = b""
    """Cut of a version with tables; the same in all its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContributed:
    """A rank contributes its part, after servers have its segment."""

    call: Call
    publisher: Publisher
    epoch: int
    publication: int
    part: PublicationPart


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFailed:
    """A rank cannot contribute its part."""

    publisher: Publisher
    publication: int
    rank: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributorLeft:
    """The caller of a request waits no longer; its part stays."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsVerified:
    """The parts cover the model, and servers have every segment."""

    epoch: int
    publication: int
    layout_digest: bytes
    segments: tuple[PublishedSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsRejected:
    """The parts of a publication are not a version."""

    epoch: int
    publication: int
    what: str
    seen: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested:
    """An operator pins or unpins a version."""

    call: Call
    number: int
    pins: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequested:
    """An operator wants an older version's bytes as a new version."""

    call: Call
    to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearRequested:
    """The series' job is removed or started over: its versions are dropped, and numbers keep
    rising."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsChanged:
    """Kept versions have other holders, have become durable, or are lost."""

    replaced: Mapping[int, tuple[PublishedSegment, ...]] = field(default_factory=dict)
    """Segments with other holders, by version."""
    durable: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class HeadWritten:
    """The write in progress is durable."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Check leases and limits against the time."""


Event = (
    BeginRequested
    | PartContributed
    | PartFailed
    | ContributorLeft
    | PartsVerified
    | PartsRejected
    | PinRequested
    | RollbackRequested
    | ClearRequested
    | VersionsChanged
    | HeadWritten
    | TimePassed
)

# --- effects ---


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationBegun:
    """Answer to a publisher that may publish."""

    call: Call
    epoch: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionAnswered:
    """Answer to a request about a version."""

    call: Call
    version: PublishedVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """Answer to `ClearRequested`."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyParts:
    """Check that the parts cover the model and that servers have the segments; submit
    `PartsVerified` or `PartsRejected`."""

    epoch: int
    publication: int
    parts: tuple[PublicationPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSeries:
    """Replace the head, put and drop versions in one transaction, unless another process has
    changed the head; submit `HeadWritten`."""

    head: SeriesHead
    put: tuple[PublishedVersion, ...] = ()
    drop: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotifyWatchers:
    """Notify watchers that the series has changed."""


Effect = (
    PublicationBegun
    | VersionAnswered
    | Cleared
    | RequestRefused
    | VerifyParts
    | WriteSeries
    | NotifyWatchers
)
