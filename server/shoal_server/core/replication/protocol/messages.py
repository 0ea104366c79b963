"""Messages between the servers of a shard. Data (gradients, chunks of a shard) travel with a
message; events and effects carry the data, but the core reads only versions and chunk numbers.

A primary's server opens a link to each server that holds copies of its shards. Requests go from the
primary to the backup, replies go back. Messages arrive in order, or the link breaks.
"""

from dataclasses import dataclass
from enum import Enum

Key = tuple[str, int]
"""A job's name and the id of one of its shards."""

Data = object
"""Data of a message, which the core passes on and does not read."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer of a shard by the primary of that epoch, which asks for the state of the server's
    copy."""

    key: Key
    epoch: int
    born: int
    """Epoch in which the shard got its first values. Shards born in different epochs differ."""
    placement_id: str = ""
    """`JobAssignments.placement_id` of the primary's record: epochs of different placements are not
    comparable. Empty: not stated."""


@dataclass(frozen=True, slots=True)
class CopyUpToDate:
    """Notice that the copy is valid up to this version, and that later records follow."""

    key: Key
    epoch: int
    version: int
    placement_id: str = ""
    """See `Offer.placement_id`."""


@dataclass(frozen=True, slots=True)
class UpdateMessage:
    """Record of one applied push."""

    key: Key
    epoch: int
    version: int
    answer_may_wait: bool = False
    """True if the answer is not urgent: the record counts as received without it."""


@dataclass(frozen=True, slots=True)
class ImageStart:
    """Start of an image: a whole shard at one version follows, in `num_chunks` chunks."""

    key: Key
    epoch: int
    born: int
    image: int
    """Number of the image, unique among all that this primary's process sends."""
    version: int
    num_chunks: int
    next_chunk: int = 0
    """Chunk at which the transfer continues: the backup has all earlier ones."""
    placement_id: str = ""
    """See `Offer.placement_id`."""


@dataclass(frozen=True, slots=True)
class ImageChunk:
    key: Key
    image: int
    index: int


Request = Offer | CopyUpToDate | UpdateMessage | ImageStart | ImageChunk


@dataclass(frozen=True, slots=True)
class BackupState:
    """State of a backup: its copy, and an image that is not complete."""

    key: Key
    epoch: int
    """The epoch that was offered."""
    copy_epoch: int = 0
    born: int = 0
    version: int = 0
    """Version up to which the copy has received all records; 0: there is no copy."""
    image: int = 0
    """Number of an incomplete image from the offering primary; 0: there is none."""
    next_chunk: int = 0
    """First chunk of that image that the backup lacks."""


@dataclass(frozen=True, slots=True)
class RecordsReceived:
    """Notice that the backup has all records up to this version."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class ImageInstalled:
    """Notice that the image is now a copy of that version; image 0: the existing copy continues."""

    key: Key
    epoch: int
    image: int
    version: int


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """Notice that the backup has stored all chunks of the image before `next_chunk`."""

    key: Key
    image: int
    next_chunk: int


class BackupRefusalReason(Enum):
    """Reason why a backup refuses a request."""

    OTHER_HOLDERS = "the record names other holders"
    FULL = "the server has no memory for the copy"
    NO_COPY = "the server has no copy that this continues"
    FAILED = "the server could not store the copy"


@dataclass(frozen=True, slots=True)
class BackupRefused:
    key: Key
    epoch: int
    why: BackupRefusalReason
    detail: str = ""
    newest_epoch: int = 0
    """Newest epoch that the backup knows; if above the primary's own, the primary is deposed."""


Reply = BackupState | ImageInstalled | RecordsReceived | ChunkReceived | BackupRefused
Message = Request | Reply
