"""Assembly of a call's pieces, within bounds on memory."""

from collections.abc import Iterable, Sequence

from shoal_proto import MAX_PIECE_BYTES
from shoal_proto.checksum import verify
from shoal_proto.dtypes import DTYPE_BYTES
from shoal_proto.errors import MalformedMessage, Overloaded, ShapeMismatch
from shoal_proto.pieces import AnyPiece, Buffer, ReadPiece
from shoal_proto.v1.shards_pb2 import Shard


def shard_bytes(shard: Shard) -> int:
    return sum(b.num_elements for b in shard.blocks) * DTYPE_BYTES[shard.dtype]


class Budget:
    """A bound on the bytes that the server holds for unfinished pushes, lookups and creations."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def reserve(self, num_bytes: int) -> None:
        """Reserve bytes. Raises Overloaded beyond the bound, unless no bytes are reserved yet."""
        if self._held_bytes and self._held_bytes + num_bytes > self._max_bytes:
            raise Overloaded(
                "the server holds as much unfinished data as it may",
                seen=f"{self._held_bytes} bytes held, {num_bytes} more asked for",
                expected=f"at most {self._max_bytes} bytes",
                fix="Retry a little later.",
            )
        self._held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes


class Reservation:
    """A call's part of the budget, by shard; all of it is released on exit."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._held: dict[int, int] = {}

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *exc: object) -> None:
        for shard_id in list(self._held):
            self.release(shard_id)

    def reserve(self, shard_id: int, num_bytes: int) -> None:
        """Reserve bytes for a shard, once. Raises Overloaded."""
        if shard_id not in self._held:
            self._budget.reserve(num_bytes)
            self._held[shard_id] = num_bytes

    def release(self, shard_id: int) -> None:
        self._budget.release(self._held.pop(shard_id, 0))


class PieceAssembler:
    """Assembles pieces that must arrive in order; refuses any other piece."""

    def __init__(self, shard_id: int, spans: Iterable[tuple[int, int]]) -> None:
        """`spans`: ranges (start, stop) of expected bytes, in order; a piece lies in one range."""
        self._shard_id = shard_id
        self._spans = [(start, stop) for start, stop in spans if start < stop]
        self.expected_bytes = sum(stop - start for start, stop in self._spans)
        self._received_bytes = 0
        self._parts: list[Buffer] = []
        self._is_shared = False
        self._position = self._spans[0][0] if self._spans else 0

    @property
    def is_complete(self) -> bool:
        return not self._spans

    def take(self, piece: AnyPiece) -> None:
        """Add the next piece. Raises ShapeMismatch if it exceeds its range, MalformedMessage for a
        wrong offset or size, and ChecksumMismatch if it changed in transit."""
        data = piece.data
        left_bytes = self._spans[0][1] - self._position if self._spans else 0
        if len(data) > left_bytes:
            raise ShapeMismatch(
                f"more bytes for shard {self._shard_id} than it has at that offset",
                seen=f"{len(data)} bytes at offset {piece.offset_bytes}",
                expected=f"at most {left_bytes} bytes",
                fix="Compare shape and dtype with the job's shard map.",
            )
        is_shared = isinstance(piece, ReadPiece) and piece.is_shared
        most_bytes = left_bytes if is_shared else min(left_bytes, MAX_PIECE_BYTES)
        if piece.offset_bytes != self._position or not data or len(data) > most_bytes:
            raise MalformedMessage(
                f"not the next piece of shard {self._shard_id}",
                seen=f"{len(data)} bytes at offset {piece.offset_bytes}",
                expected=f"1 to {most_bytes} bytes at offset {self._position}",
            )
        verify(f"a piece of shard {self._shard_id}", piece.checksum, data)
        self._is_shared |= is_shared
        self._parts.append(data)
        self._received_bytes += len(data)
        self._position += len(data)
        if self._position == self._spans[0][1]:
            self._spans.pop(0)
            self._position = self._spans[0][0] if self._spans else 0

    def truncated(self) -> ShapeMismatch:
        """Return the error for a stream that ended too early."""
        return ShapeMismatch(
            f"the stream ended within shard {self._shard_id}",
            seen=f"{self._received_bytes} bytes",
            expected=f"{self.expected_bytes} bytes",
            fix="Compare shape and dtype with the job's shard map.",
        )

    @property
    def is_borrowed(self) -> bool:
        """True if `join` returns memory that the sender of the pieces reuses."""
        return self._is_shared and len(self._parts) == 1

    def join(self) -> Buffer:
        """Return all bytes, copied unless they came in one piece."""
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)


class ChunkAssembler(PieceAssembler):
    """Assembles the pieces of one shard of parameters."""

    def __init__(
        self,
        shard: Shard,
        absent_blocks: Sequence[int] = (),
        *,
        with_base: bool = False,
        encoded_bytes: int | None = None,
    ) -> None:
        """Expect the bytes of all blocks but the absent ones. Raises MalformedMessage for absent
        blocks that do not exist.

        `with_base`: the base values follow the gradient, at their offsets in the shard plus the
        shard's size. `encoded_bytes`: size of the encoded gradients, which are expected instead.
        """
        num_blocks = len(shard.blocks)
        absent = set(absent_blocks)
        if absent and not max(absent) < num_blocks:
            raise MalformedMessage(
                f"shard {shard.shard_id} has no such block",
                seen=f"absent block {max(absent)}",
                expected=f"an index below {num_blocks}",
            )
        self.blocks = [b for b in range(num_blocks) if b not in absent]
        spans = _spans(shard, absent)
        if with_base:
            end = shard_bytes(shard)
            spans += [(end + start, end + stop) for start, stop in spans]
        if encoded_bytes is not None:
            spans = [(0, encoded_bytes)]
        super().__init__(shard.shard_id, spans)


def _spans(shard: Shard, absent: set[int]) -> list[tuple[int, int]]:
    if not absent:
        return [(0, shard_bytes(shard))]
    spans: list[tuple[int, int]] = []
    start = 0
    for index, block in enumerate(shard.blocks):
        stop = start + block.num_elements * DTYPE_BYTES[shard.dtype]
        if index not in absent:
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
        start = stop
    return spans
