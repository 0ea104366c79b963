"""Events of a server's core. Times are of its process's monotonic clock, in seconds."""

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
    """Safety that an update must have before it is acknowledged."""

    APPLIED = "the primary has applied the update"
    REPLICATED = "every backup in step has received the update too"
    DURABLE = "the update is on disk as well"
    """The disk of the primary's server."""


# --- the record, and etcd ---


@dataclass(frozen=True, slots=True)
class ShardAssigned:
    """The newest record of a shard was read. None: it is gone, or belongs to another placement."""

    key: Key
    assignment: ShardAssignment | None
    placement_id: str = ""
    """`JobAssignments.placement_id` of the record. Ids and epochs of different placements cannot be
    compared."""


@dataclass(frozen=True, slots=True)
class ShardRecordRead:
    """The newest record was read for a write that `WriteShardRecord` asked for. The core answers
    with one `ReviseShardRecord`."""

    key: Key
    assignment: ShardAssignment


@dataclass(frozen=True, slots=True)
class ShardRecordWritten:
    """The effect `WriteShardRecord` was carried out or no longer applies, or may be tried again
    after `ShardRecordNotWritten`. If the record was changed, a `ShardAssigned` precedes this."""

    key: Key


@dataclass(frozen=True, slots=True)
class ShardRecordNotWritten:
    """etcd refuses the write, and would again; `ShardRecordWritten` follows when a retry is due."""

    key: Key


@dataclass(frozen=True, slots=True)
class ShardRecordRefreshed:
    """The newest record was read and submitted as `ShardAssigned`, or it could not be read."""

    key: Key


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """etcd renewed this server's registration, by a request sent at `sent_s`."""

    sent_s: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The removal of this server's registration begins: the server must not acknowledge any further
    push."""


# --- the shards on this server ---


@dataclass(frozen=True, slots=True)
class ShardCreated:
    """A shard that this server is to lead has got its first values, or has been loaded."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class PushApplied:
    """A push was applied by this server, as primary."""

    key: Key
    record: Record


@dataclass(frozen=True, slots=True)
class AckRequested:
    """A caller asks to be notified once a version is safe at that level."""

    token: Token
    key: Key
    epoch: int
    version: int
    level: AckLevel


@dataclass(frozen=True, slots=True)
class AckAbandoned:
    """A caller stopped waiting for its `AckRequested`."""

    token: Token
    key: Key


@dataclass(frozen=True, slots=True)
class VersionJournaled:
    """The journal of this server has the whole shard, up to this version. None: the journal no
    longer keeps the shard, because the disk fails."""

    key: Key
    version: int | None


@dataclass(frozen=True, slots=True)
class PushesStopped:
    """All further pushes of the epoch are refused; the last applied push made this version."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class CopySettled:
    """All received records of a shard are applied."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class CopyFailed:
    """Received records could not be applied, or the copy was found to differ from its primary's
    values: the copy is unusable."""

    key: Key


@dataclass(frozen=True, slots=True)
class ShardRetired:
    """The shard is to be dropped on this server, led or not: its job is over, it starts over, or a
    loaded shard is to replace it."""

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
    """True if the peer's process is known to be gone, so that waiting is useless."""
    has_replied: bool = False
    """True if anything was received over the link."""


@dataclass(frozen=True, slots=True)
class RecordDelivered:
    """A sent record is in the memory of the peer's process. The peer reads it before it uses its
    copy (see `SettleCopy`), even if this process dies."""

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
    """The image that `MakeImage` asked for was taken."""

    key: Key
    image: int
    version: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class ImageNotMade:
    """The image that `MakeImage` asked for could not be taken."""

    key: Key
    image: int
    detail: str


# --- links to this server ---


@dataclass(frozen=True, slots=True)
class IncomingLinkOpened:
    """A primary has opened a link to this server."""

    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class IncomingLinkEnded:
    """A primary's link ended; all messages that it had sent were read before, unless `is_torn`."""

    peer: Holder
    link: int
    is_torn: bool = False
    """True if some messages were not read: records that copies lack may have been acknowledged."""


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
    """All chunks of an image were received, and a shard was built from them."""

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
    """A probe ended; `answers` is True if that exact process answered."""

    peer: Holder
    answers: bool


# --- after a restart ---


@dataclass(frozen=True, slots=True)
class JournalShardFound:
    """The journal has a shard of this epoch and version from an earlier process of this server."""

    key: Key
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class JournalShardMissing:
    """The shard that `LoadJournal` asked for is not in the journal, or cannot be read."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class ServersListed:
    """Servers that etcd listed in answer to a request sent at `asked_s`, not from a cache."""

    present: frozenset[Holder]
    asked_s: float
    ended: frozenset[Holder] = frozenset()
    """Processes known to have ended."""


@dataclass(frozen=True, slots=True)
class WakeTimeReached:
    """The time of `ReplicationCore.wakes_s` has come."""


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
