"""Rows of tables in messages: requested, pushed and returned rows, sorted by shard."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shoal_proto.checksum import verify
from shoal_proto.errors import StalePush
from shoal_proto.row_hash import shard_of
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.tables_pb2 import FoundRows, TablePushOutcome

ID_BYTES = 8
MESSAGE_BYTES = 1024 * 1024
"""Maximum bytes of values, or of ids and births, in one message, unless one row has more: both
together are at most twice as many."""

Where = tuple[str, int]
"""Name of a table, index of one of its virtual shards."""
Bytes = bytes | memoryview
Piece = TypeVar("Piece")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one shard at `version` or later, in the order of the request."""

    version: int
    epoch: int
    births: bytes
    """A little-endian uint64 a row: the version that created it; 0 for a row that does not exist
    yet and is returned with initial values."""
    values: bytes
    step: int
    """Number of the table's steps that the shard knew of."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients for rows of one shard, and the version on which they were computed."""

    ids: Bytes
    births: Bytes
    gradients: Bytes
    base_version: int
    base_epoch: int
    step: int = 0
    """Number of the table's steps, as far as the caller knows."""
    lr: float | None = None
    """Learning rate; None: the one in the table's spec."""
    codec: GradientCodec | None = None
    """Codec of the gradients; None: in the table's dtype."""

    @property
    def num_rows(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's encoded gradient."""
        return len(self.gradients) // max(self.num_rows, 1)


@dataclass(kw_only=True)
class TablePushResult:
    """Result of one push. Every shard's part was applied exactly once, except those in `stale`."""

    sequence: int
    versions: dict[Where, int] = field(default_factory=dict)
    """Version of each shard right after this push."""
    staleness: dict[Where, int] = field(default_factory=dict)
    """Number, by shard, of updates between `Gradients.base_version` and this push."""
    fates: dict[Where, bytes] = field(default_factory=dict)
    """RowFate of each pushed row, by shard; empty: all were applied."""
    steps: dict[Where, int] = field(default_factory=dict)
    """Number of the table's steps that each shard knows of."""
    retries: int = 0
    """Number of rounds of attempts beyond the first, redirects included."""
    duplicates: int = 0
    """Number of shards that answered a retry of a push that they had applied before."""
    stale: dict[Where, StalePush] = field(default_factory=dict)
    """Errors by shard, of shards that applied nothing: they were lost and reset after the lookup,
    so the rows of these gradients no longer exist."""


def route(ids: Iterable[int], num_shards: int) -> "dict[int, array[int]]":
    """Group ids by virtual shard: each id once, in rising order."""
    routed: dict[int, array[int]] = {}
    for row_id in sorted(set(ids)):
        routed.setdefault(shard_of(row_id, num_shards), array("q")).append(row_id)
    return routed


def packed(pieces: Iterable[tuple[Piece, int]]) -> Iterator[list[Piece]]:
    """Pack pieces, each given with its size in bytes, into messages of about MESSAGE_BYTES. Yields
    at least one message, which may be empty."""
    message: list[Piece] = []
    held_bytes = 0
    for piece, num_bytes in pieces:
        if message and held_bytes + num_bytes > MESSAGE_BYTES:
            yield message
            message, held_bytes = [], 0
        message.append(piece)
        held_bytes += num_bytes
    yield message


def note(result: TablePushResult, where: Where, reply: TablePushOutcome) -> None:
    result.versions[where] = reply.version
    result.staleness[where] = reply.staleness
    result.fates[where] = reply.fates
    result.steps[where] = reply.step
    result.duplicates += reply.duplicate


def check(reply: FoundRows) -> None:
    verify(f"rows of shard {reply.shard_id}", reply.checksum, reply.births, reply.values)


def joined(parts: Sequence[Rows]) -> Rows:
    """Join the parts of one shard's rows. The version is the lowest of theirs: no row is older."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        version=min(part.version for part in parts),
        epoch=min(part.epoch for part in parts),
        births=b"".join(part.births for part in parts),
        values=b"".join(part.values for part in parts),
        step=max(part.step for part in parts),
    )
