"""Pieces of shards as encoded on the wire, without copying their data in and out of a message.

protobuf's Python messages copy a bytes field when it is set, when it is read, and once more when
the message is serialized or parsed: at gigabytes a second that is most of the work. The functions
here write and read the same encoding (`Piece` in parameters.proto, as the only field of the message
around it), so either end may use the generated messages instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from google.protobuf.message import Message

Buffer = bytes | bytearray | memoryview

_MAX_VARINT_BYTES = 10
_UINT32, _UINT64 = 2**32 - 1, 2**64 - 1
_VARINT, _LENGTH, _FIXED32 = 0, 2, 5
_SHARD_ID = 1 << 3 | _VARINT
_OFFSET_BYTES = 2 << 3 | _VARINT
_DATA = 3 << 3 | _LENGTH
_CHECKSUM = 4 << 3 | _FIXED32

ALIGNMENT = 8
"""Alignment in bytes of data that are read in place, enough for any dtype: the memory of a bytes
object is aligned itself."""

PUSH_REQUEST = CREATE_REQUEST = SHARD_DATA = 2
"""Number of the field `piece` in PushRequest, CreateRequest and ShardData."""
PUSH_REPLY = 3
"""Number of the field `piece` in PushReply."""


class AnyPiece(Protocol):
    """A Piece message, or a ReadPiece."""

    @property
    def shard_id(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def data(self) -> Buffer: ...
    @property
    def checksum(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """The fields of a Piece. `data` is a view of the memory that the piece was read from, if
    aligned there; else a copy."""

    shard_id: int
    offset_bytes: int
    data: memoryview
    checksum: int | None
    """None: the data lie in shared memory, and have no checksum."""
    is_shared: bool = False
    """True if the data lie in shared memory, which the sender may reuse once the receiver has
    answered."""


@dataclass(frozen=True, slots=True)
class OnlyPiece:
    """A message whose one field is a piece."""

    piece: ReadPiece

    def HasField(self, name: str) -> bool:  # noqa: N802 - as messages have it
        return name == "piece"

    def WhichOneof(self, group: str) -> Literal["piece"]:  # noqa: N802
        return "piece"


def encode(
    field: int, shard_id: int, offset_bytes: int, parts: Sequence[Buffer], checksum: int
) -> bytes:
    """Return the serialized message around a piece whose data are these parts, concatenated.

    The data begin at a multiple of ALIGNMENT, except after numbers far larger than any shard's: the
    numbers before them are padded with extra bytes, which protobuf allows.
    """
    num_bytes = sum(map(len, parts))
    tail = bytes((_CHECKSUM,)) + checksum.to_bytes(4, "little")
    for padding in range(2 * ALIGNMENT):
        head = bytearray((_SHARD_ID,))
        unplaced = _put_varint(head, shard_id, padding)
        head.append(_OFFSET_BYTES)
        unplaced = _put_varint(head, offset_bytes, unplaced)
        head.append(_DATA)
        _put_varint(head, num_bytes)
        around = bytearray((field << 3 | _LENGTH,))
        _put_varint(around, len(head) + num_bytes + len(tail))
        # No padding fits into numbers far larger than any shard's: then the reader copies the data.
        if unplaced or (len(around) + len(head)) % ALIGNMENT == 0:
            break
    return b"".join((around, head, *parts, tail))


Whole = TypeVar("Whole", bound=Message)


class PieceDecoder(Generic[Whole]):
    """Reads messages of one type. A message that has only a piece, as `encode` writes it, is read
    in place."""

    def __init__(self, field: int, parse: Callable[[bytes], Whole]) -> None:
        """`field` is the field number of the piece; `parse` reads any other message."""
        self._tag = field << 3 | _LENGTH
        self._parse = parse
        # Names the type in reports of unreadable messages.
        self.__self__: Any = getattr(parse, "__self__", None)

    def __call__(self, data: bytes) -> "Whole | OnlyPiece":
        """Decode a message. Raises DecodeError for bytes that are not of this type."""
        if data and data[0] == self._tag:
            piece = _read(data)
            if piece is not None:
                return OnlyPiece(piece)
        return self._parse(data)


def _read(data: bytes) -> ReadPiece | None:
    """Return the piece; None for an encoding with other fields or another order, which is rare."""
    try:
        size, at = _varint(data, 1)
        if at + size != len(data):
            return None
        shard_id = offset_bytes = checksum = 0
        if data[at] == _SHARD_ID:
            shard_id, at = _varint(data, at + 1)
        if data[at] == _OFFSET_BYTES:
            offset_bytes, at = _varint(data, at + 1)
        if data[at] != _DATA:
            return None
        num_bytes, at = _varint(data, at + 1)
        stop = at + num_bytes
        if stop + 5 == len(data) and data[stop] == _CHECKSUM:
            checksum = int.from_bytes(data[stop + 1 :], "little")
        elif stop != len(data):
            return None
    except IndexError:
        return None
    whole = memoryview(data)[at:stop]
    aligned = whole if at % ALIGNMENT == 0 else memoryview(bytes(whole))
    return ReadPiece(shard_id & _UINT32, offset_bytes & _UINT64, aligned, checksum)


def _put_varint(into: bytearray, value: int, padding: int = 0) -> int:
    """Write a number with `padding` extra bytes; return the number of these that did not fit."""
    start = len(into)
    while value > 0x7F:
        into.append(value & 0x7F | 0x80)
        value >>= 7
    into.append(value)
    used = min(padding, _MAX_VARINT_BYTES - (len(into) - start))
    if used:
        into[-1] |= 0x80
        into += b"\x80" * (used - 1) + b"\0"
    return padding - used


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a number of more than 64 bits")
