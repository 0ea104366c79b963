"""What the servers of a shard tell each other. Data (gradients, chunks of a shard) travels with a
message and is none of the core's business; it knows versions and numbers of chunks.

A primary opens a link to each server that is to have copies of its shards. Requests go from the
primary to the backup, replies back; what one side sends arrives in order or the link breaks.
"""

from dataclasses import dataclass
from enum import Enum

Key = tuple[str, int]
"""A job's name and the id of one of its shards."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The primary of that epoch has a shard for this server, and asks what it has of it."""

    key: Key
    epoch: int
    born: int
    """The epoch in which the shard got its first values: those of another one are others."""
    run: str = ""
    """That of the record which the primary goes by: epochs of another run are others. Empty: not
    stated."""


@dataclass(frozen=True, slots=True)
class Continue:
    """The copy is a part of what the primary has: from its version on, records follow."""

    key: Key
    epoch: int
    version: int
    run: str = ""
    """As in `Offer`."""


@dataclass(frozen=True, slots=True)
class UpdateMessage:
    """One push, as it was applied."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class ImageStart:
    """A whole shard follows, as of one version, in so many chunks."""

    key: Key
    epoch: int
    born: int
    image: int
    """Names it among all that this primary's process ever sends."""
    version: int
    num_chunks: int
    next_chunk: int = 0
    """Where it goes on: what came before is there."""
    run: str = ""
    """As in `Offer`."""


@dataclass(frozen=True, slots=True)
class ImageChunk:
    key: Key
    image: int
    index: int


Request = Offer | Continue | UpdateMessage | ImageStart | ImageChunk


@dataclass(frozen=True, slots=True)
class Holds:
    """What a backup has: of the copy, and of an image that has not come whole."""

    key: Key
    epoch: int
    """That was offered."""
    copy_epoch: int = 0
    born: int = 0
    version: int = 0
    """Of the copy, up to which everything was received; 0: there is none."""
    image: int = 0
    next_chunk: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """All up to this version is here."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The image is kept as a copy of that version; image 0: the copy that was here goes on."""

    key: Key
    epoch: int
    image: int
    version: int


@dataclass(frozen=True, slots=True)
class ChunkTaken:
    key: Key
    image: int
    next_chunk: int


class Why(Enum):
    """Why a backup does not take what it is told."""

    OTHER_HOLDERS = "the record names other holders"
    FULL = "it has no memory for it"
    NO_COPY = "it has no copy that this follows on"
    FAILED = "it could not take it"


@dataclass(frozen=True, slots=True)
class Refused:
    key: Key
    epoch: int
    why: Why
    detail: str = ""
    newest_epoch: int = 0
    """Of the shard, as far as the backup knows; above the primary's, it is deposed."""


Reply = Holds | Installed | Received | ChunkTaken | Refused
Message = Request | Reply
