"""Receipt of the rows of one shard's part of a push: in messages, or in pieces of a bulk call."""

from dataclasses import dataclass
from typing import Protocol

from shoal_proto.checksum import verify
from shoal_proto.errors import MalformedMessage, ShapeMismatch, ShoalError
from shoal_proto.pieces import AnyPiece, Buffer
from shoal_proto.v1.tables_pb2 import RowGradients
from shoal_server.parameters.shard.chunk_assembler import PieceAssembler
from shoal_server.parameters.tables.batch import ID_BYTES

RowsPiece = RowGradients | AnyPiece
"""RowGradients over gRPC, a piece over a bulk connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedRows:
    """All rows of one shard's part. Ids and births are copies that this server owns."""

    ids: bytes
    births: bytes
    gradient: Buffer
    is_borrowed: bool
    """True if the sender reuses the gradient's memory once the push is answered."""


class IncomingRows(Protocol):
    @property
    def is_complete(self) -> bool: ...

    def take(self, piece: RowsPiece) -> None:
        """Add the next rows. Raises ChecksumMismatch, ShapeMismatch or MalformedMessage."""
        ...

    def truncated(self) -> ShoalError:
        """Return the error for a stream that ended before all rows were received."""
        ...

    def joined(self) -> ReceivedRows: ...


class RowMessages:
    """Rows received in messages, each with ids, births and gradients of some rows."""

    def __init__(self, shard_id: int, num_rows: int) -> None:
        self._shard_id = shard_id
        self._num_rows = num_rows
        self._num_received = 0
        self._ids: list[bytes] = []
        self._births: list[bytes] = []
        self._gradients: list[bytes] = []

    @property
    def is_complete(self) -> bool:
        return self._num_received == self._num_rows

    def take(self, piece: RowsPiece) -> None:
        assert isinstance(piece, RowGradients)
        what = f"rows of shard {piece.shard_id}"
        verify(what, piece.checksum, piece.ids, piece.births, piece.gradients)
        self._num_received += len(piece.ids) // ID_BYTES
        if self._num_received > self._num_rows or not piece.ids:
            raise ShapeMismatch(
                f"another number of rows for shard {piece.shard_id} than announced",
                seen=f"{self._num_received} rows, {len(piece.ids)} bytes of ids in a message",
                expected=f"{self._num_rows} rows, some in each message",
            )
        self._ids.append(piece.ids)
        self._births.append(piece.births)
        self._gradients.append(piece.gradients)

    def truncated(self) -> ShapeMismatch:
        return ShapeMismatch(
            f"the stream ended within shard {self._shard_id}",
            seen=f"{self._num_received} rows",
            expected=f"{self._num_rows} rows",
        )

    def joined(self) -> ReceivedRows:
        return ReceivedRows(
            ids=b"".join(self._ids),
            births=b"".join(self._births),
            gradient=b"".join(self._gradients),
            is_borrowed=False,
        )


class RowPieces:
    """Rows received in pieces: all ids, then all births, then all gradients. A piece may begin and
    end at any byte."""

    def __init__(self, shard_id: int, num_rows: int, row_bytes: int) -> None:
        """`row_bytes`: size of one row's gradient."""
        self._ids_bytes = num_rows * ID_BYTES
        num_bytes = 2 * self._ids_bytes + num_rows * row_bytes
        self._assembler = PieceAssembler(shard_id, [(0, num_bytes)])

    @property
    def is_complete(self) -> bool:
        return self._assembler.is_complete

    def take(self, piece: RowsPiece) -> None:
        if isinstance(piece, RowGradients):
            raise MalformedMessage(
                f"rows of shard {piece.shard_id} in a message",
                seen="RowGradients",
                expected="pieces: this call came by a bulk connection",
            )
        self._assembler.take(piece)

    def truncated(self) -> ShapeMismatch:
        return self._assembler.truncated()

    def joined(self) -> ReceivedRows:
        flat = memoryview(self._assembler.join())
        births_at, gradient_at = self._ids_bytes, 2 * self._ids_bytes
        return ReceivedRows(
            ids=bytes(flat[:births_at]),
            births=bytes(flat[births_at:gradient_at]),
            gradient=flat[gradient_at:],
            is_borrowed=self._assembler.is_borrowed,
        )
