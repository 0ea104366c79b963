"""Pieces of tensors, over a bulk connection or gRPC."""

from dataclasses import dataclass
from typing import Literal, Protocol

Buffer = bytes | bytearray | memoryview


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
    """The fields of a Piece. `data` is a view of the memory that the piece was read to."""

    shard_id: int
    offset_bytes: int
    data: memoryview
    checksum: int | None
    """None: data in shared memory."""
    is_shared: bool = False
    """True if the data lie in shared memory, which the sender may reuse once the receiver has
    answered."""


@dataclass(frozen=True, slots=True)
class OnlyPiece:
    """Used in place of a message that has a piece and no other field: its `piece` is a
    ReadPiece."""

    piece: ReadPiece

    def HasField(self, name: str) -> bool:  # noqa: N802 - as messages have it
        return name == "piece"

    def WhichOneof(self, group: str) -> Literal["piece"]:  # noqa: N802
        return "piece"
