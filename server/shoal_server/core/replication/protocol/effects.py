"""Effects of a server's core, carried out in order. Each has all that its edge needs: an edge does
not read the core. "Then `X`": once the effect is carried out, the edge submits the event `X`."""

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
    """Reason why a version is not acknowledged."""

    DEPOSED = "another server leads the shard, or will soon"
    FENCED = "other servers may have assumed this server dead"
    NO_DISK = "the journal does not keep the shard"


@dataclass(frozen=True, slots=True)
class WriteShardRecord:
    """Read the shard's newest record, submit it as `ShardRecordRead`, and replace it by the record
    in the answer (compare-and-swap). Repeat that until it succeeds, and then submit
    `ShardRecordWritten`; if etcd refuses the write, submit `ShardRecordNotWritten` before that."""

    key: Key


@dataclass(frozen=True, slots=True)
class ReviseShardRecord:
    """Write this record in place of the one that was just read, unless both are equal."""

    key: Key
    assignment: ShardAssignment


@dataclass(frozen=True, slots=True)
class RefreshShardRecord:
    """Read the shard's newest record; then `ShardRecordRefreshed`."""

    key: Key


@dataclass(frozen=True, slots=True)
class SetLease:
    """Admit pushes until this time: afterwards other servers may have assumed this server dead."""

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
    """Accept pushes in this epoch, after `OpenShard`; keep them in the journal, if there is one."""

    key: Key
    epoch: int
    placement_id: str = ""
    """`JobAssignments.placement_id` of the shard's record."""


@dataclass(frozen=True, slots=True)
class OpenShard:
    """Allow reads and pushes: the shard's first values have reached all its holders."""

    key: Key


@dataclass(frozen=True, slots=True)
class StopPushes:
    """Refuse further pushes, because the shard is being handed over, or a later epoch is known;
    then `PushesStopped`."""

    key: Key


@dataclass(frozen=True, slots=True)
class ResumePushes:
    """Accept pushes again: the shard was not handed over."""

    key: Key


@dataclass(frozen=True, slots=True)
class StepDown:
    """Refuse further pushes, with this epoch in the refusals, and keep the shard as a copy; then
    `CopySettled`."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class DropShard:
    """Discard the shard with all its data."""

    key: Key


@dataclass(frozen=True, slots=True)
class SettleCopy:
    """Apply all received records; then `CopySettled` or `CopyFailed`."""

    key: Key
    last: Holder | None = None
    """The primary that the copy followed. It may still be sending, and counts sent records as
    received: first close its link to new records, and read all that were sent. None: the primary
    has stopped, and all its records are confirmed as received."""


@dataclass(frozen=True, slots=True)
class SetFollowers:
    """Note which servers follow a shard that this server leads; at first none do."""

    key: Key
    is_followed: bool
    """True if any server has, or is getting, a copy of the shard from this server."""
    links: tuple[tuple[Holder, int], ...]
    """Links over which each push is sent."""


@dataclass(frozen=True, slots=True)
class SetUnreplicated:
    """Note the size of the records that some follower may still need."""

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
    """Send a request over a link that this server opened. The edge takes an image's header and the
    data of its chunks from the image that `MakeImage` took."""

    peer: Holder
    link: int
    request: Request
    record: Record | None = None
    """The record that an `UpdateMessage` announces. The core keeps the record as long as a follower
    needs it; if the record is gone when it would be sent, no follower needs it any more."""


@dataclass(frozen=True, slots=True)
class SendReply:
    """Send a reply over a link that the peer opened."""

    peer: Holder
    link: int
    reply: Reply
    may_wait: bool = False
    """True if the reply is not urgent."""


@dataclass(frozen=True, slots=True)
class MakeImage:
    """Take an image of the shard as it is now; then `ImageMade` or `ImageNotMade`."""

    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class ReleaseChunks:
    """Release all chunks before `next_chunk`: the peer has them."""

    image: int
    next_chunk: int


@dataclass(frozen=True, slots=True)
class CloseImage:
    """Free the image that `MakeImage` took: no further chunk of it is sent."""

    image: int


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """Process the data of a received request, after the data of all earlier requests.

    `UpdateMessage`: apply the record; `CopyFailed` if that is impossible. `ImageStart`: allocate
    memory for the image; `ImageFailed` if there is not enough. `ImageChunk`: store the chunk; then
    `ChunkStored`, or `ImageRestored` after the last chunk; `ImageFailed` if that is impossible.
    """

    request: UpdateMessage | ImageStart | ImageChunk
    data: Data


@dataclass(frozen=True, slots=True)
class AdoptImage:
    """Keep the restored image as a copy of that epoch, in place of any other copy."""

    key: Key
    image: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class DropImage:
    """Discard the chunks received of an image."""

    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class EnterEpoch:
    """Set the copy's epoch; its content is unchanged."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class ProbePeer:
    """Probe whether that exact process answers; then `PeerProbed`."""

    peer: Holder


@dataclass(frozen=True, slots=True)
class LoadJournal:
    """Build the shard from the journal, to lead it in this epoch; then `ShardRetired`, which drops
    any copy here, and `ShardCreated`; or else `JournalShardMissing`."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """Log a line for operators."""

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
