"""What a server's core is told. Times are its process's monotonic clock, in seconds."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from shoal_server.core.replication.protocol.messages import Key, Reply, Request
from shoal_server.core.shards.assignments import Holder, ShardAssignment

Token = Hashable
"""Names who waits for an acknowledgement."""


class Level(Enum):
    """How safe an update is to be before its sender hears of it."""

    APPLIED = "its primary has applied it"
    REPLICATED = "every backup in step has it too"
    DURABLE = "it is on disk as well"


# --- the record, and etcd ---


@dataclass(frozen=True, slots=True)
class Assigned:
    """The newest record of a shard; None: it is gone, or is another run's."""

    key: Key
    assignment: ShardAssignment | None
    run: str = ""
    """Of the job, that the record is of: numbers and epochs of another run are others."""


@dataclass(frozen=True, slots=True)
class Written:
    """What the effect `Write` asked for was written, or does not apply. The record that stands was
    told before, by `Assigned`."""

    key: Key


@dataclass(frozen=True, slots=True)
class NotWritten:
    """etcd refuses the write for good; `Written` follows once it makes sense to try again."""

    key: Key


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The newest record of the shard was read, and told by `Assigned`; or it could not be read."""

    key: Key


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """etcd keeps this server's registration: as of when that was asked for."""

    sent_s: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """This server is about to take its registration away: it acknowledges nothing any more."""


# --- the shards here ---


@dataclass(frozen=True, slots=True)
class Created:
    """A shard that this server is to lead has got its first values, or has been loaded."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The primary here has applied a push."""

    key: Key
    version: int
    is_kept: bool = True
    """Whether it can still be told to others: nothing was kept of it where nobody followed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody is to hear of a version once it is as safe as that."""

    token: Token
    key: Key
    epoch: int
    version: int
    level: Level


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Who asked waits no longer."""

    token: Token
    key: Key


@dataclass(frozen=True, slots=True)
class OnDisk:
    """This server's journal has the shard, whole, up to this version."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class DiskFailed:
    """This server's journal does not keep the shard any more."""

    key: Key


@dataclass(frozen=True, slots=True)
class Stopped:
    """Pushes of the epoch are refused from here on; the last one applied made this version."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Everything that was received of a shard is applied."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """What was received could not be applied: the copy is not what it should be."""

    key: Key


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop every copy of the shard here: its job is over, or it is to begin anew."""

    key: Key


# --- links from here ---


@dataclass(frozen=True, slots=True)
class LinkOpened:
    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class LinkBroke:
    """A link broke, or could not be opened."""

    peer: Holder
    link: int
    is_gone: bool
    """That process is known to be gone: to wait for it would be in vain."""
    was_heard: bool = False
    """Whether anything was heard over it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A record was sent so that the other end's process has it in its memory by now, and reads it
    before anything becomes of its copy (see `Settle`), whatever becomes of this process."""

    peer: Holder
    link: int
    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Replied:
    peer: Holder
    link: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class ImageCut:
    """The image that was asked for is taken."""

    key: Key
    image: int
    version: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class ImageNotCut:
    """It could not be taken."""

    key: Key
    image: int
    detail: str


# --- links to here ---


@dataclass(frozen=True, slots=True)
class CallerCame:
    """A primary has opened a link to here."""

    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class CallerLeft:
    """All that it had sent was read before."""

    peer: Holder
    link: int
    is_torn: bool = False
    """It was not: what copies lack of it may have been acknowledged."""


@dataclass(frozen=True, slots=True)
class Requested:
    peer: Holder
    link: int
    request: Request


@dataclass(frozen=True, slots=True)
class ChunkStored:
    key: Key
    image: int
    index: int


@dataclass(frozen=True, slots=True)
class ImageRestored:
    """All its chunks are there, and a shard was made of them."""

    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class ImageFailed:
    """It has no room here, or is not what it should be."""

    key: Key
    image: int
    is_full: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Whether that very process answered."""

    peer: Holder
    answers: bool


# --- after a restart ---


@dataclass(frozen=True, slots=True)
class JournalHas:
    """The last process of this server left the shard in the journal, up to that version of that
    epoch."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class NotInJournal:
    """What `LoadJournal` asked for is not there, or cannot be read."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class ServersSeen:
    """The servers that etcd listed when it was asked; not remembered ones."""

    present: frozenset[Holder]
    asked_s: float
    ended: frozenset[Holder] = frozenset()
    """Processes that are known to have come to their end."""


@dataclass(frozen=True, slots=True)
class Woken:
    """Time has passed."""


Event = (
    Assigned
    | Written
    | NotWritten
    | Refreshed
    | LeaseRenewed
    | LeaseEnded
    | Created
    | Applied
    | Asked
    | Abandoned
    | OnDisk
    | DiskFailed
    | Stopped
    | Settled
    | CopyFailed
    | Forget
    | LinkOpened
    | LinkBroke
    | Held
    | Replied
    | ImageCut
    | ImageNotCut
    | CallerCame
    | CallerLeft
    | Requested
    | ChunkStored
    | ImageRestored
    | ImageFailed
    | Probed
    | JournalHas
    | NotInJournal
    | ServersSeen
    | Woken
)
