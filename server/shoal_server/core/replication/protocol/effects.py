"""What a server's core wants done, in the order given; what comes of it is told as an event."""

from dataclasses import dataclass
from enum import Enum

from shoal_server.core.replication.protocol.events import Token
from shoal_server.core.replication.protocol.messages import Key, Reply, Request
from shoal_server.core.shards.assignments import Holder


class Refusal(Enum):
    """Why a version is not acknowledged."""

    DEPOSED = "another server leads the shard, or is about to"
    FENCED = "this server may have been taken for dead"
    NO_DISK = "the journal does not keep the shard"


@dataclass(frozen=True, slots=True)
class Write:
    """Replace the shard's record by `ReplicationCore.revised` of it, by compare-and-swap, however
    often etcd has to be asked; then `Written`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read the shard's record anew; then `Refreshed`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Acknowledge:
    token: Token


@dataclass(frozen=True, slots=True)
class Refuse:
    token: Token
    why: Refusal


@dataclass(frozen=True, slots=True)
class Lead:
    """Take pushes in this epoch, once `Opened`; keep them in the journal, if there is one."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class Open:
    """Its first values are where they have to be: it may be read and pushed to."""

    key: Key


@dataclass(frozen=True, slots=True)
class Stop:
    """Take no more pushes, for the shard is handed over; then `Stopped`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Resume:
    """Take pushes again: it was not handed over."""

    key: Key


@dataclass(frozen=True, slots=True)
class StepDown:
    """Take no more pushes and keep the shard as a copy; then `Settled`. Pushes are refused as of
    that epoch."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of the shard and of all that belongs to it."""

    key: Key


@dataclass(frozen=True, slots=True)
class Settle:
    """Apply all that was received; then `Settled` or `CopyFailed`."""

    key: Key
    last: Holder | None = None
    """The primary that the copy followed, which may still be sending, and takes what it has sent
    for received: nothing more is taken of it first, and all that it has sent by then is read. None:
    it has stopped, and heard that all was received."""


@dataclass(frozen=True, slots=True)
class Trim:
    """Nobody needs what was applied up to this version."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class OpenLink:
    """Connect to that server; then `LinkOpened`, or `LinkBroke` with the same number."""

    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Nothing comes of it any more, and nothing is heard over it."""

    peer: Holder
    link: int


@dataclass(frozen=True, slots=True)
class Send:
    """Over a link that this server opened. A record's data is the one of its version, a chunk's
    that of its image."""

    peer: Holder
    link: int
    request: Request


@dataclass(frozen=True, slots=True)
class Answer:
    """Over a link that the peer opened."""

    peer: Holder
    link: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class CutImage:
    """Take the shard as it is now; then `ImageCut` or `ImageNotCut`."""

    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class ReleaseChunks:
    """The other end has the image up to this chunk."""

    image: int
    next_chunk: int


@dataclass(frozen=True, slots=True)
class CloseImage:
    image: int


@dataclass(frozen=True, slots=True)
class Replay:
    """Apply the record that has just come, behind those before it."""

    key: Key
    version: int


@dataclass(frozen=True, slots=True)
class BeginImage:
    """Make room for the image that has just been announced; `ImageFailed` if there is none. Its
    chunks may come at once."""

    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """The chunk that has just come; then `ChunkStored` or `ImageFailed`. The last one is followed
    by `ImageRestored`."""

    key: Key
    image: int
    index: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Keep the restored image as a copy of that epoch, in place of any other."""

    key: Key
    image: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class DropImage:
    """Let go of what has come of an image."""

    key: Key
    image: int


@dataclass(frozen=True, slots=True)
class EnterEpoch:
    """The copy is as it is, and of that epoch from now on."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether that very process answers; then `Probed`."""

    peer: Holder


@dataclass(frozen=True, slots=True)
class LoadJournal:
    """Make the shard that the journal has, to lead it in this epoch; then `Created`,
    or `NotInJournal`."""

    key: Key
    epoch: int


@dataclass(frozen=True, slots=True)
class Note:
    """For people."""

    what: str
    key: Key | None = None
    peer: Holder | None = None
    detail: str = ""


Effect = (
    Write
    | Refresh
    | Acknowledge
    | Refuse
    | Lead
    | Open
    | Stop
    | Resume
    | StepDown
    | Drop
    | Settle
    | Trim
    | OpenLink
    | CloseLink
    | Send
    | Answer
    | CutImage
    | ReleaseChunks
    | CloseImage
    | Replay
    | BeginImage
    | StoreChunk
    | Adopt
    | DropImage
    | EnterEpoch
    | Probe
    | LoadJournal
    | Note
)
