"""Parameters' bytes are gathered into pieces of their shards, and scattered back."""

import random
from collections.abc import Mapping

import pytest

from shoal_client.shards.blocks import ShardBlocks
from shoal_proto.checksum import crc32
from shoal_proto.errors import ChecksumMismatch, MalformedMessage
from shoal_proto.v1.parameters_pb2 import Piece
from shoal_proto.v1.shards_pb2 import Block, Shard

SIZES = {"a": 700_000, "b": 3, "c": 64}
SHARD = Shard(
    shard_id=7,
    dtype="float32",
    blocks=[
        Block(parameter="b", offset=1, num_elements=2),
        Block(parameter="a", offset=64, num_elements=699_000),
        Block(parameter="c", offset=0, num_elements=64),
    ],
)
NUM_BYTES = 4 * (2 + 699_000 + 64)
PIECE_BYTES = 1 << 20


def buffers(fill: int | None = None) -> dict[str, memoryview]:
    """Buffers of the parameters, with random bytes or with one value."""
    rng = random.Random(0)
    return {
        name: memoryview(
            bytearray(rng.randbytes(4 * size) if fill is None else bytes([fill]) * 4 * size)
        )
        for name, size in SIZES.items()
    }


def piece(offset_bytes: int, data: bytes) -> Piece:
    return Piece(shard_id=7, offset_bytes=offset_bytes, data=data, checksum=crc32(data))


def gathered(source: Mapping[str, memoryview]) -> list[Piece]:
    return [
        piece(at, b"".join(parts)) for at, parts in ShardBlocks(SHARD).gather(source, PIECE_BYTES)
    ]


def test_gathered_bytes_are_scattered_to_the_same_places() -> None:
    """The blocks are restored, in any order of the pieces, and no other byte changes."""
    source, into = buffers(), buffers(9)
    blocks = ShardBlocks(SHARD)
    assert blocks.num_bytes == NUM_BYTES
    pieces = gathered(source)
    assert len(pieces) > 2
    for each in reversed(pieces):
        blocks.scatter(each, into)
    assert into["c"] == source["c"]
    assert into["b"][4:] == source["b"][4:]
    assert set(into["b"][:4]) == {9}
    last = 4 * (64 + 699_000)
    assert into["a"][256:last] == source["a"][256:last]
    assert set(into["a"][:256]) == set(into["a"][last:]) == {9}


def test_no_piece_spans_an_absent_parameter() -> None:
    source = buffers()
    del source["a"]
    pieces = gathered(source)
    assert [each.offset_bytes for each in pieces] == [0, 4 * (2 + 699_000)]
    assert ShardBlocks(SHARD).absent(source) == [1]


BAD_PIECES = {
    "corrupted": (Piece(shard_id=7, data=bytes(8), checksum=crc32(bytes(8)) ^ 1), ChecksumMismatch),
    "beyond the end": (piece(NUM_BYTES - 4, bytes(8)), MalformedMessage),
    "far beyond the end": (piece(1 << 40, bytes(8)), MalformedMessage),
}


@pytest.mark.parametrize("name", BAD_PIECES)
def test_a_bad_piece_changes_no_buffer(name: str) -> None:
    """A piece from a server is checked before a byte of it is written."""
    bad, kind = BAD_PIECES[name]
    into = buffers(9)
    with pytest.raises(kind):
        ShardBlocks(SHARD).scatter(bad, into)
    assert all(set(buffer) == {9} for buffer in into.values())
