"""Lookups and pushes at one server: over the bulk transport if there is one, else over gRPC."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc

from shoal_client.bulk.bulk_transport import BulkTransport
from shoal_client.bulk.connection import BulkConnection
from shoal_client.parameters.table_rows import (
    ID_BYTES,
    MESSAGE_BYTES,
    Bytes,
    Gradients,
    Rows,
    check,
    packed,
)
from shoal_client.shards.parts import GradientPart, in_pieces
from shoal_proto.checksum import crc32, verify
from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.pieces import OnlyPiece
from shoal_proto.status import from_detail
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2_grpc import ParametersStub
from shoal_proto.v1.tables_pb2 import (
    FoundRows,
    RowGradients,
    RowIds,
    TableLookupHeader,
    TableLookupItem,
    TableLookupRequest,
    TablePushHeader,
    TablePushOutcome,
    TablePushRequest,
)
from shoal_proto.v1.tables_pb2_grpc import TablesStub

MIN_SLOT_BYTES = 16 * 1024


def _slot_bytes_for(num_bytes: int) -> int:
    """Size of a slot for parts of this size, with a reserve: the number of rows of a shard differs
    from step to step."""
    return max(num_bytes + num_bytes // 4, MIN_SLOT_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedRows:
    """Requested rows of one shard, few enough for one message."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PushedRows:
    """All rows of one shard in a push."""

    shard_id: int
    gradients: Gradients
    row_bytes: int

    def part(self) -> GradientPart:
        g = self.gradients
        buffers = [memoryview(g.ids), memoryview(g.births), memoryview(g.gradients)]
        return GradientPart(self.shard_id, sum(map(len, buffers)), in_pieces(buffers))


class TableCalls:
    """Calls to one server about tables. For one thread at a time, except `close`. Raises
    grpc.RpcError or a ShoalError."""

    def __init__(
        self, address: str, channel: grpc.Channel, token: Callable[[], Token], *, transport: str
    ) -> None:
        self._token = token
        self._stub = TablesStub(channel)
        self._bulk = BulkTransport(
            address,
            ParametersStub(channel).OpenBulk,
            token,
            transport=transport,
            slot_bytes_for=_slot_bytes_for,
        )

    @property
    def transport(self) -> str:
        """Transport of the last call: `shared-memory`, `unix-socket`, `tcp`, `tls` or `grpc`."""
        return self._bulk.name

    def close(self) -> None:
        """Close the connection; a call in progress on another thread fails."""
        self._bulk.close()

    def _connection(self, sizes: Iterable[int], timeout_s: float) -> BulkConnection | None:
        known = list(sizes)
        return self._bulk.connection(max(known, default=0), len(known), timeout_s)

    def look_up(
        self, asked: Sequence[AskedRows], timeout_s: float
    ) -> Iterator[tuple[int, Rows | ShoalError]]:
        """Yield for each request, by its index and in order of arrival, the rows or the error."""
        connection = self._connection((a.answer_bytes for a in asked), timeout_s)
        if connection is None:
            return self._look_up_by_messages(asked, timeout_s)
        items = [
            TableLookupItem(shard_id=a.shard_id, epoch=a.epoch, num_rows=a.num_rows) for a in asked
        ]
        header = TableLookupHeader(token=self._token(), items=items)
        parts = [
            GradientPart(number, a.answer_bytes, in_pieces([memoryview(a.ids)]))
            for number, a in enumerate(asked)
        ]
        replies = connection.look_up(TableLookupRequest(header=header), parts, timeout_s)
        return _received(asked, replies)

    def _look_up_by_messages(
        self, asked: Sequence[AskedRows], timeout_s: float
    ) -> Iterator[tuple[int, Rows | ShoalError]]:
        messages = packed(
            (
                RowIds(shard_id=a.shard_id, epoch=a.epoch, ids=bytes(a.ids)),
                a.answer_bytes,
            )
            for a in asked
        )
        header = TableLookupHeader(token=self._token())
        requests = (
            TableLookupRequest(header=None if number else header, rows=rows)
            for number, rows in enumerate(messages)
        )
        number = 0
        for reply in self._stub.Lookup(requests, timeout=timeout_s):
            for found in reply.rows:
                if found.HasField("error"):
                    yield number, from_detail(found.error)
                else:
                    check(found)
                    yield number, _rows(found, found.births, found.values)
                number += 1

    def push(
        self, header: TablePushHeader, pushed: Sequence[PushedRows], timeout_s: float
    ) -> Iterator[TablePushOutcome]:
        """Yield the outcome or the error of each shard's rows, in order of arrival."""
        parts = [each.part() for each in pushed]
        connection = self._connection((part.num_bytes for part in parts), timeout_s)
        if connection is not None:
            request = TablePushRequest(header=header)
            for reply in connection.push_rows(request, parts, timeout_s):
                yield from reply.outcomes
            return
        pieces = (piece for each in pushed for piece in _messages(each))
        requests = (
            TablePushRequest(header=None if number else header, rows=rows)
            for number, rows in enumerate(packed(pieces))
        )
        for reply in self._stub.Push(requests, timeout=timeout_s):
            yield from reply.outcomes


def rows_a_message(row_bytes: int) -> int:
    """Number of rows in one message: as many as have MESSAGE_BYTES of values, or of ids and births
    if these are larger; at least one."""
    return max(1, MESSAGE_BYTES // max(row_bytes, 2 * ID_BYTES))


def _messages(pushed: PushedRows) -> Iterator[tuple[RowGradients, int]]:
    """Pieces of one shard's rows, each small enough for one message, with their sizes in bytes."""
    part, row_bytes = pushed.gradients, pushed.row_bytes
    size = rows_a_message(row_bytes)
    for start in range(0, part.num_rows, size):
        ids = bytes(part.ids[start * ID_BYTES : (start + size) * ID_BYTES])
        births = bytes(part.births[start * ID_BYTES : (start + size) * ID_BYTES])
        data = bytes(part.gradients[start * row_bytes : (start + size) * row_bytes])
        rows = RowGradients(
            shard_id=pushed.shard_id,
            ids=ids,
            births=births,
            gradients=data,
            checksum=crc32(data, crc32(births, crc32(ids))),
        )
        yield rows, len(ids) + len(births) + len(data)


def _rows(found: FoundRows, births: bytes, values: bytes) -> Rows:
    return Rows(
        version=found.version, epoch=found.epoch, births=births, values=values, step=found.step
    )


def _received(
    asked: Sequence[AskedRows], replies: "Iterable[FoundRows | OnlyPiece]"
) -> Iterator[tuple[int, Rows | ShoalError]]:
    """Yield each item's rows of a bulk call, once all its bytes have arrived, or its error. Raises
    MalformedMessage or ChecksumMismatch."""
    incoming: dict[int, _IncomingRows] = {}
    for reply in replies:
        if isinstance(reply, OnlyPiece):
            number = reply.piece.shard_id
            if number not in incoming:
                raise _unexpected(f"a piece of item {number}, which was not announced")
            incoming[number].take(reply)
        else:
            number = reply.item
            if not number < len(asked):
                raise _unexpected(f"an answer to item {number} of {len(asked)}")
            if reply.HasField("error"):
                yield number, from_detail(reply.error)
                continue
            if reply.num_bytes != asked[number].answer_bytes:
                raise _unexpected(f"{reply.num_bytes} bytes for {asked[number].num_rows} rows")
            incoming[number] = _IncomingRows(reply, asked[number].num_rows)
        rows = incoming[number].whole()
        if rows is not None:
            del incoming[number]
            yield number, rows


class _IncomingRows:
    """Received bytes of one item: births, then values."""

    def __init__(self, found: FoundRows, num_rows: int) -> None:
        self._found = found
        self._births_bytes = num_rows * ID_BYTES
        self._data = bytearray()

    def take(self, reply: OnlyPiece) -> None:
        piece = reply.piece
        if piece.offset_bytes != len(self._data):
            raise _unexpected(f"bytes from {piece.offset_bytes} on, after {len(self._data)} bytes")
        if len(self._data) + len(piece.data) > self._found.num_bytes:
            raise _unexpected(f"more than the {self._found.num_bytes} bytes that were announced")
        verify(f"rows of shard {self._found.shard_id}", piece.checksum, piece.data)
        self._data += piece.data

    def whole(self) -> Rows | None:
        """The rows; None until all bytes have arrived."""
        if len(self._data) < self._found.num_bytes:
            return None
        births, values = self._data[: self._births_bytes], self._data[self._births_bytes :]
        return _rows(self._found, bytes(births), bytes(values))


def _unexpected(seen: str) -> MalformedMessage:
    return MalformedMessage(
        "the answer to a lookup is malformed", seen=seen, expected="the rows asked for"
    )
