"""Events of a server's core. Times are of the process' monotonic clock."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import Data, Key, Reply, Request
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.shard_log import Record

Token = Hashable
"""Identifies a caller that waits for an acknowledgement."""


class AckLevel(Enum):
    APPLIED = "the primary has applied the update"
    REPLICATED = "every backup in step has received the update too"
    DURABLE = "the update is on disk as well"


# --- the record, and etcd ---


@dataclass(frozen=True, slots=True)
class ShardAssigned:
    """The newest record was read. None: it is gone, or of another placement."""

    key: Key
    assignment: ShardAssignment | None
    placement_id: str = ""
    """`JobAssignments.placement_id`. Ids and epochs of different placements cannot be compared."""


@dataclass(frozen=True, slots=True)
class ShardRecordRead:
    """The newest record was read for a write. The core answers with one `ReviseShardRecord`."""

    key: Key
    assignment: ShardAssignment


@dataclass(frozen=True, slots=True)
class ShardRecordWritten:
    """`WriteShardRecord` is over, or may be tried again after `ShardRecordNotWritten`. A changed
    record is submitted as `ShardAssigned` before."""

    key: Key


@dataclass(frozen=True, slots=True)
class ShardRecordNotWritten:
    """etcd refused the write; `ShardRecordWritten` follows when a retry is due."""

    key: Key


@dataclass(frozen=True, slots=True)
class ShardRecordRefreshed:
    """The newest record was submitted as `ShardAssigned`, or could not be read."""

    key: Key


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """etcd renewed this server's registration, on a request sent at `sent_s`."""

    sent_s: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The removal of this server's registration begins: no further push may be acknowledged."""


# --- the shards on this server ---


@dataclass(frozen=True, slots=True)
class ShardCreated:
    """A shard to be led here has its first values, or has been loaded."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class PushApplied:
    key: Key
    record: Record


@dataclass(frozen=True, slots=True)
class AckRequested:
    """A caller waits until a version is safe at that level."""

    token: Token
    key: Key
    epoch: int
    version: int
    level: AckLevel


@dataclass(frozen=True, slots=True)
class AckAbandoned:
    token: Token
    key: Key


@dataclass(frozen=True, slots=True)
class VersionJournaled:
    """The journal holds the whole shard up to this version. None: the disk fails, and the journal
    no longer keeps the shard."""

    key: Key
    version: int | None


@dataclass(frozen=True, slots=True)
class PushesStopped:
    """Further pushes of the epoch are refused; `version`: the shard's after the last push."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class CopySettled:
    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """The copy is unusable: a record could not be applied, or values differ from the primary's."""

    key: Key


@dataclass(frozen=True, slots=True)
class ShardRetired:
    """The shard is to be dropped here: its job is over or starts over, or a loaded shard replaces
    it."""

    key: Key


# --- links from this server ---


@dataclass(frozen=True, slots=True)
class LinkOpened:
    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A link broke, or could not be opened."""

    peer: Holder
    link: int
    is_gone: bool
    """True if the peer's process is known to be gone."""
    has_replied: bool = False
    """True if a reply was received over the link."""


@dataclass(frozen=True, slots=True)
class RecordDelivered:
    """A record is in the memory of the peer's process. The peer reads it before it uses its copy
    (see `SettleCopy`)."""

    peer: Holder
    link: int
    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class ReplyReceived:
    peer: Holder
    link: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class ImageMade:
    key: Key
    image: int
    version: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class ImageNotMade:
    key: Key
    image: int
    detail: str


# --- links to this server ---


@dataclass(frozen=True, slots=True)
class IncomingLinkOpened:
    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class IncomingLinkEnded:
    """A primary's link ended, and all its messages were read before, unless `is_torn`."""

    peer: Holder
    link: int
    is_torn: bool = False
    """True if messages were not read: copies may lack acknowledged records."""


@dataclass(frozen=True, slots=True)
class RequestReceived:
    peer: Holder
    link: int
    request: Request
    data: Data = None


@dataclass(frozen=True, slots=True)
class ChunkStored:
    key: Key
    image: int
    index: int


@dataclass(frozen=True, slots=True)
class ImageRestored:
    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class ImageFailed:
    """An image does not fit into memory, or is not valid."""

    key: Key
    image: int
    is_full: bool
    detail: str


@dataclass(frozen=True, slots=True)
class PeerProbed:
    """A probe ended; `answers`: that exact process answered."""

    peer: Holder
    answers: bool


# --- after a restart ---


@dataclass(frozen=True, slots=True)
class JournalShardFound:
    """The journal has a shard from an earlier process of this server."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class JournalShardMissing:
    """The journal cannot supply the shard of a `LoadJournal`."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class ServersListed:
    """Servers that etcd listed on a request sent at `asked_s`, not from a cache."""

    present: frozenset[Holder]
    asked_s: float
    ended: frozenset[Holder] = frozenset()


@dataclass(frozen=True, slots=True)
class WakeTimeReached:
    """`ReplicationCore.wakes_s` has come."""


Event = (
    ShardAssigned
    | ShardRecordRead
    | ShardRecordWritten
    | ShardRecordNotWritten
    | ShardRecordRefreshed
    | LeaseRenewed
    | LeaseEnded
    | ShardCreated
    | PushApplied
    | AckRequested
    | AckAbandoned
    | VersionJournaled
    | PushesStopped
    | CopySettled
    | CopyFailed
    | ShardRetired
    | LinkOpened
    | LinkBroken
    | RecordDelivered
    | ReplyReceived
    | ImageMade
    | ImageNotMade
    | IncomingLinkOpened
    | IncomingLinkEnded
    | RequestReceived
    | ChunkStored
    | ImageRestored
    | ImageFailed
    | PeerProbed
    | JournalShardFound
    | JournalShardMissing
    | ServersListed
    | WakeTimeReached
)
