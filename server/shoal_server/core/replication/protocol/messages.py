"""Messages between the servers of a shard.

The primary's server opens the link. Requests go to the backup, replies come back. A link has one
stream for images and one for other messages. The messages of one stream arrive in order, or the
link breaks.
"""

from dataclasses import dataclass
from enum import Enum

Key = tuple[str, int]
"""A job, and the id of one of its shards."""

Data = object
"""Gradients or a chunk; the core does not read it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer of a shard by its primary, which asks for the state of the copy."""

    key: Key
    epoch: int
    born: int
    """Epoch of the shard's first values. Shards born in different epochs differ."""
    placement_id: str = ""
    """`JobAssignments.placement_id`: epochs of different placements are not comparable. Empty: not
    stated."""


@dataclass(frozen=True, slots=True)
class CopyUpToDate:
    """Notice that the copy is valid up to this version; later records follow."""

    key: Key
    epoch: int
    version: int
    placement_id: str = ""
    """See `Offer.placement_id`."""


@dataclass(frozen=True, slots=True)
class UpdateMessage:
    key: Key
    epoch: int
    version: int
    answer_may_wait: bool = False
    """True if the record counts as received without the answer."""


@dataclass(frozen=True, slots=True)
class ImageStart:
    """Start of an image in `num_chunks` chunks."""

    key: Key
    epoch: int
    born: int
    image: int
    """Number of the image, unique within the primary's process."""
    version: int
    num_chunks: int
    next_chunk: int = 0
    """First chunk sent; the backup has the earlier ones."""
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
    key: Key
    epoch: int
    copy_epoch: int = 0
    born: int = 0
    version: int = 0
    """Version up to which the copy has all records; 0: no copy."""
    image: int = 0
    """Incomplete image from the offering primary; 0: none."""
    next_chunk: int = 0
    """First chunk that the backup lacks."""


@dataclass(frozen=True, slots=True)
class RecordsReceived:
    """Notice that the backup has all records up to this version."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class ImageInstalled:
    """Notice that the copy has this version; image 0: the existing copy continues."""

    key: Key
    epoch: int
    image: int
    version: int


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """Notice that the backup has stored the image's chunks before `next_chunk`."""

    key: Key
    image: int
    next_chunk: int


class BackupRefusalReason(Enum):
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
    """Newest epoch that the backup knows; a later one than the primary's own deposes the primary.
    """


Reply = BackupState | ImageInstalled | RecordsReceived | ChunkReceived | BackupRefused
Message = Request | Reply
