"""Rows of tables: requested, pushed and returned rows, sorted by shard."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal_client.parameters.calls import ParameterCalls
from shoal_client.shards.parts import GradientPart, in_pieces
from shoal_proto.checksum import verify
from shoal_proto.errors import MalformedMessage, ShoalError, StalePush
from shoal_proto.pieces import AnyPiece, OnlyPiece
from shoal_proto.row_hash import shard_of
from shoal_proto.status import from_detail
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import (
    FoundRows,
    LookupHeader,
    LookupItem,
    LookupReply,
    PushOutcome,
)

ID_BYTES = 8
ITEM_BYTES = 1024 * 1024
"""Maximum bytes of values, or of ids and births, in one item of a lookup, unless the item is a
single row."""
MIN_SLOT_BYTES = 16 * 1024

Where = tuple[str, int]
"""Table, and index of one of its shards."""
Bytes = bytes | memoryview


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of one shard at `version` or later, in the order of the request."""

    version: int
    epoch: int
    births: bytes
    """Little-endian uint64 for each row: the version that created the row; 0: the row does not
    exist yet, and has initial values."""
    values: bytes
    step: int
    """The table's steps that the shard knew of."""


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients for rows of one shard, and their base version."""

    ids: Bytes
    births: Bytes
    gradients: Bytes
    base_version: int
    base_epoch: int
    step: int = 0
    """The table's steps that the caller knows of."""
    lr: float | None = None
    """None: the rate in the table's spec."""
    codec: GradientCodec | None = None
    """None: gradients in the table's dtype."""

    @property
    def num_rows(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's encoded gradient."""
        return len(self.gradients) // max(self.num_rows, 1)


@dataclass(kw_only=True)
class TablePushResult:
    """Result of a push; see `PushResult`."""

    sequence: int
    versions: dict[Where, int] = field(default_factory=dict)
    epochs: dict[Where, int] = field(default_factory=dict)
    staleness: dict[Where, int] = field(default_factory=dict)
    fates: dict[Where, bytes] = field(default_factory=dict)
    """RowFate of each pushed row; empty: all were applied."""
    steps: dict[Where, int] = field(default_factory=dict)
    """The table's steps that each shard knows of."""
    retries: int = 0
    duplicates: int = 0
    stale: dict[Where, StalePush] = field(default_factory=dict)
    """Shards that applied nothing: they were lost and reset after the lookup."""


def route(ids: Iterable[int], num_shards: int) -> "dict[int, array[int]]":
    """Group ids by the index of their shard: each id once, in rising order."""
    routed: dict[int, array[int]] = {}
    for row_id in sorted(set(ids)):
        routed.setdefault(shard_of(row_id, num_shards), array("q")).append(row_id)
    return routed


def note(result: TablePushResult, where: Where, reply: PushOutcome, epoch: int) -> None:
    result.versions[where], result.epochs[where] = reply.version, epoch
    result.staleness[where] = reply.staleness
    result.fates[where] = reply.fates
    result.steps[where] = reply.step
    result.duplicates += reply.duplicate


def joined(parts: Sequence[Rows]) -> Rows:
    """Join parts of one shard's rows. The version is the lowest: no row is older."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        version=min(part.version for part in parts),
        epoch=min(part.epoch for part in parts),
        births=b"".join(part.births for part in parts),
        values=b"".join(part.values for part in parts),
        step=max(part.step for part in parts),
    )


def slot_bytes_for(num_bytes: int) -> int:
    """Size of a slot, with space to spare: a shard's number of rows differs from step to step."""
    return max(num_bytes + num_bytes // 4, MIN_SLOT_BYTES)


def part_of(shard_id: int, rows: Gradients) -> GradientPart:
    """The data of one shard's rows in a push: ids, births and gradients."""
    buffers = [memoryview(rows.ids), memoryview(rows.births), memoryview(rows.gradients)]
    return GradientPart(shard_id, sum(map(len, buffers)), in_pieces(buffers))


def rows_an_item(row_bytes: int) -> int:
    """Rows in one item of a lookup; see ITEM_BYTES."""
    return max(1, ITEM_BYTES // max(row_bytes, 2 * ID_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedRows:
    """Requested rows of one shard: one item of a lookup."""

    shard_id: int
    epoch: int
    ids: Bytes
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def answer_bytes(self) -> int:
        return self.num_rows * (ID_BYTES + self.row_bytes)


def look_up(
    calls: ParameterCalls, token: Token, asked: Sequence[AskedRows], timeout_s: float
) -> Iterator[tuple[int, Rows | ShoalError]]:
    """Look rows up at one server. Yield each item's number, and its rows or error, as they
    arrive."""
    items = [LookupItem(shard_id=a.shard_id, epoch=a.epoch, num_rows=a.num_rows) for a in asked]
    parts = [
        GradientPart(number, a.answer_bytes, in_pieces([memoryview(a.ids)]))
        for number, a in enumerate(asked)
    ]
    return received(asked, calls.look_up(LookupHeader(token=token, items=items), parts, timeout_s))


def received(
    asked: Sequence[AskedRows], replies: "Iterable[LookupReply | OnlyPiece]"
) -> Iterator[tuple[int, Rows | ShoalError]]:
    """Yield each item's rows, once complete, or its error. Raises MalformedMessage or
    ChecksumMismatch."""
    incoming: dict[int, _IncomingRows] = {}
    for reply in replies:
        if isinstance(reply, OnlyPiece) or reply.HasField("piece"):
            number = reply.piece.shard_id
            if number not in incoming:
                raise _unexpected(f"a piece of item {number}, which was not announced")
            incoming[number].take(reply.piece)
            announced = [number]
        else:
            announced = []
            for found in reply.rows:
                if not found.item < len(asked):
                    raise _unexpected(f"an answer to item {found.item} of {len(asked)}")
                if found.HasField("error"):
                    yield found.item, from_detail(found.error)
                    continue
                item = asked[found.item]
                if found.num_bytes != item.answer_bytes:
                    raise _unexpected(f"{found.num_bytes} bytes for {item.num_rows} rows")
                incoming[found.item] = _IncomingRows(found, item.num_rows)
                announced.append(found.item)
        for number in announced:
            rows = incoming[number].whole()
            if rows is not None:
                del incoming[number]
                yield number, rows


class _IncomingRows:
    def __init__(self, found: FoundRows, num_rows: int) -> None:
        self._found = found
        self._births_bytes = num_rows * ID_BYTES
        self._data = bytearray(found.num_bytes)
        self._num_received = 0

    def take(self, piece: AnyPiece) -> None:
        # Each access to a message's data copies them.
        data = piece.data
        start, stop = self._num_received, self._num_received + len(data)
        if piece.offset_bytes != start:
            raise _unexpected(f"bytes from {piece.offset_bytes} on, after {start} bytes")
        if stop > self._found.num_bytes:
            raise _unexpected(f"more than the {self._found.num_bytes} bytes that were announced")
        verify(f"rows of shard {self._found.shard_id}", piece.checksum, data)
        self._data[start:stop] = data
        self._num_received = stop

    def whole(self) -> Rows | None:
        if self._num_received < self._found.num_bytes:
            return None
        data = memoryview(self._data)
        return Rows(
            version=self._found.version,
            epoch=self._found.epoch,
            births=bytes(data[: self._births_bytes]),
            values=bytes(data[self._births_bytes :]),
            step=self._found.step,
        )


def _unexpected(seen: str) -> MalformedMessage:
    return MalformedMessage(
        "the answer to a lookup is malformed", seen=seen, expected="the rows asked for"
    )
