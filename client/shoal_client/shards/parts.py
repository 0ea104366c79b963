"""Data that a call sends for one shard."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal_proto.v1.codec_pb2 import GradientCodec

PIECE_BYTES = 2 * 1024 * 1024
"""Most shards fit into one piece; a server has to join several, which copies them."""

Pieces = Iterable[tuple[int, Sequence[memoryview]]]
"""Offset in the shard, and the caller's memory with the bytes from that offset on."""


@dataclass(frozen=True, slots=True)
class GradientPart:
    """A shard of a call."""

    shard_id: int
    """Id of the shard; in a lookup of rows, the item's number."""
    num_bytes: int
    """Maximum number of bytes sent for the shard, and of bytes returned for it."""
    pieces: Callable[[int], Pieces]
    """Returns the pieces in order, of at most the given size."""


def in_pieces(buffers: Sequence[memoryview]) -> Callable[[int], Pieces]:
    """Return the `pieces` of a part that consists of these buffers."""

    def pieces(piece_bytes: int) -> Iterator[tuple[int, Sequence[memoryview]]]:
        start, held_bytes = 0, 0
        parts: list[memoryview] = []
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                taken = buffer[at : at + piece_bytes - held_bytes]
                parts.append(taken)
                at += len(taken)
                held_bytes += len(taken)
                if held_bytes == piece_bytes:
                    yield start, parts
                    start, held_bytes, parts = start + held_bytes, 0, []
        if parts:
            yield start, parts

    return pieces


@dataclass(frozen=True, slots=True)
class EncodedGradient:
    """A shard's compressed gradient."""

    codec: GradientCodec
    data: memoryview

    def pieces(self, piece_bytes: int) -> Pieces:
        for start in range(0, len(self.data), piece_bytes):
            yield start, (self.data[start : start + piece_bytes],)


@dataclass(frozen=True, slots=True)
class EncodedPush:
    """Encoded gradients that a push sends for some shards, at every attempt."""

    shards: Mapping[int, EncodedGradient]
    applied: Callable[[int], None]
    """Called with each of these shards once it has applied its part."""
