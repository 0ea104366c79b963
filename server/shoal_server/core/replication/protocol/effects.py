"""Effects of a server's core, carried out in order. An effect contains all that its edge needs.
"Then `X`": the edge submits the event `X` afterwards."""

from dataclasses import dataclass
from enum import Enum

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.events import Token
from shoal_server.core.replication.protocol.messages import (
    Data,
    ImageChunk,
    ImageStart,
    Key,
    Reply,
    Request,
    UpdateMessage,
)
from shoal_server.core.shards.assignments import ShardAssignment
from shoal_server.core.shards.shard_log import Record


class AckRefusalReason(Enum):
    DEPOSED = "another server leads the shard, or will soon"
    FENCED = "other servers may have assumed this server dead"
    NO_DISK = "the journal does not keep the shard"


@dataclass(frozen=True, slots=True)
class WriteShardRecord:
    """Read the newest record, submit `ShardRecordRead`, and replace the record as the core answers
    (compare-and-swap). Repeat until it succeeds; then `ShardRecordWritten`. If etcd refuses the
    write, `ShardRecordNotWritten` comes before that."""

    key: Key


@dataclass(frozen=True, slots=True)
class ReviseShardRecord:
    """Write this record in place of the one just read, unless they are equal."""

    key: Key
    assignment: ShardAssignment


@dataclass(frozen=True, slots=True)
class RefreshShardRecord:
    """Read the newest record; then `ShardRecordRefreshed`."""

    key: Key


@dataclass(frozen=True, slots=True)
class SetLease:
    """Admit pushes until this time: later, other servers may have assumed this server dead."""

    ends_s: float


@dataclass(frozen=True, slots=True)
class AcknowledgeVersion:
    token: Token


@dataclass(frozen=True, slots=True)
class RefuseVersion:
    token: Token
    why: AckRefusalReason


@dataclass(frozen=True, slots=True)
class LeadShard:
    """Become the shard's primary in this epoch, and keep its pushes in the journal, if there is
    one. Pushes are accepted after a later `OpenShard`."""

    key: Key
    epoch: int
    placement_id: str = ""


@dataclass(frozen=True, slots=True)
class OpenShard:
    """Allow reads and pushes: all holders have the first values."""

    key: Key


@dataclass(frozen=True, slots=True)
class StopPushes:
    """Refuse further pushes; then `PushesStopped`."""

    key: Key


@dataclass(frozen=True, slots=True)
class ResumePushes:
    """Accept pushes again: the shard was not handed over."""

    key: Key


@dataclass(frozen=True, slots=True)
class StepDown:
    """Refuse further pushes, naming this epoch, and keep a copy; then `CopySettled`."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class DropShard:
    key: Key


@dataclass(frozen=True, slots=True)
class SettleCopy:
    """Apply all received records; then `CopySettled` or `CopyFailed`."""

    key: Key
    last: Holder | None = None
    """The primary that the copy followed, whose sent records count as received: first close its
    link to new records, and read what was sent. None: no record is unread."""


@dataclass(frozen=True, slots=True)
class SetFollowers:
    """Note the followers of a shard led here; at first there are none."""

    key: Key
    is_followed: bool
    """True if any server has, or is getting, a copy."""
    links: tuple[tuple[Holder, int], ...]
    """Links over which pushes are sent."""


@dataclass(frozen=True, slots=True)
class SetUnreplicated:
    """Note the size of the records that followers may still need."""

    key: Key
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Connect to that server; then `LinkOpened`, or `LinkBroken` with the same number."""

    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link; it causes no further events."""

    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Send a request over a link of this server. The header and chunks of an image come from the
    image that `MakeImage` took."""

    peer: Holder
    link: int
    request: Request
    record: Record | None = None
    """The record that an `UpdateMessage` announces. If the record is gone from memory, no follower
    needs it."""


@dataclass(frozen=True, slots=True)
class SendReply:
    """Send a reply over a link that the peer opened."""

    peer: Holder
    link: int
    reply: Reply
    may_wait: bool = False


@dataclass(frozen=True, slots=True)
class MakeImage:
    """Take an image of the shard now; then `ImageMade` or `ImageNotMade`."""

    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class ReleaseChunks:
    """Release the chunks before `next_chunk`."""

    image: int
    next_chunk: int


@dataclass(frozen=True, slots=True)
class CloseImage:
    """Free an image that `MakeImage` took."""

    image: int


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """Process the data of a request, after the data of earlier requests.

    `UpdateMessage`: apply the record, or `CopyFailed`. `ImageStart`: allocate memory, or
    `ImageFailed`. `ImageChunk`: store the chunk; then `ChunkStored`, `ImageRestored` after the last
    one, or `ImageFailed`.
    """

    request: UpdateMessage | ImageStart | ImageChunk
    data: Data


@dataclass(frozen=True, slots=True)
class AdoptImage:
    """Keep the restored image as the shard's copy."""

    key: Key
    image: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class DropImage:
    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class EnterEpoch:
    """Set the copy's epoch; its content is unchanged."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class ProbePeer:
    """Find out if that exact process answers; then `PeerProbed`."""

    peer: Holder


@dataclass(frozen=True, slots=True)
class LoadJournal:
    """Build the shard from the journal; then `ShardRetired` and `ShardCreated`, or
    `JournalShardMissing`."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class LogLine:
    what: str
    key: Key | None = None
    peer: Holder | None = None
    detail: str = ""


Effect = (
    WriteShardRecord
    | ReviseShardRecord
    | RefreshShardRecord
    | SetLease
    | AcknowledgeVersion
    | RefuseVersion
    | LeadShard
    | OpenShard
    | StopPushes
    | ResumePushes
    | StepDown
    | DropShard
    | SettleCopy
    | SetFollowers
    | SetUnreplicated
    | OpenLink
    | CloseLink
    | SendRequest
    | SendReply
    | MakeImage
    | ReleaseChunks
    | CloseImage
    | AcceptRequest
    | AdoptImage
    | DropImage
    | EnterEpoch
    | ProbePeer
    | LoadJournal
    | LogLine
)
