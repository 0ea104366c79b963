"""The assembler of pieces: they are joined to a shard's bytes, or refused."""

import zlib

import pytest

from shoal_proto.errors import (
    ChecksumMismatch,
    MalformedMessage,
    Overloaded,
    ShapeMismatch,
    ShoalError,
)
from shoal_proto.v1.parameters_pb2 import Piece
from shoal_proto.v1.shards_pb2 import Block, Shard
from shoal_server.parameters.shard.chunk_assembler import Budget, ChunkAssembler, Reservation

SHARD = Shard(
    shard_id=1,
    dtype="float32",
    blocks=[Block(parameter=name, num_elements=10) for name in ("a", "b", "c")],
)
DATA = bytes(range(120))


def piece(start: int, stop: int, data: bytes = DATA) -> Piece:
    part = data[start:stop]
    return Piece(shard_id=1, offset_bytes=start, data=part, checksum=zlib.crc32(part))


def test_pieces_in_order_make_the_shard() -> None:
    """The last piece alone completes it."""
    assembler = ChunkAssembler(SHARD)
    for start, stop in ((0, 1), (1, 50), (50, 119)):
        assembler.take(piece(start, stop))
        assert not assembler.is_complete
    assembler.take(piece(119, 120))
    assert assembler.is_complete
    assert assembler.join() == DATA


def test_nothing_is_expected_for_absent_blocks() -> None:
    """The pieces skip blocks without a gradient, and the result does not have these."""
    assembler = ChunkAssembler(SHARD, absent_blocks=(1,))
    assert assembler.blocks == [0, 2]
    assembler.take(piece(0, 40))
    assembler.take(piece(80, 120))
    assert assembler.is_complete
    assert assembler.join() == DATA[:40] + DATA[80:]
    assert ChunkAssembler(SHARD, absent_blocks=(0, 1, 2)).is_complete
    with pytest.raises(MalformedMessage, match="absent block 3"):
        ChunkAssembler(SHARD, absent_blocks=(3,))


def test_a_gradient_may_be_followed_by_its_base() -> None:
    """The base has offsets beyond the shard, for the same blocks; both are joined."""
    assembler = ChunkAssembler(SHARD, absent_blocks=(1,), with_base=True)
    assert assembler.expected_bytes == 160
    twice = DATA + DATA
    for start, stop in ((0, 40), (80, 120), (120, 150), (150, 160)):
        assembler.take(piece(start, stop, twice))
    assert not assembler.is_complete
    with pytest.raises(MalformedMessage, match=r"offset 160; expected .* offset 200"):
        assembler.take(piece(160, 170, twice))
    assembler.take(piece(200, 240, twice))
    assert assembler.is_complete
    assert assembler.join() == (DATA[:40] + DATA[80:]) * 2


@pytest.mark.parametrize(
    ("bad", "kind", "fragment"),
    [
        (piece(20, 60), MalformedMessage, "offset 20; expected .* offset 10"),
        (piece(0, 10), MalformedMessage, "at offset 0"),
        (piece(10, 10), MalformedMessage, "0 bytes"),
        (piece(10, 150, bytes(150)), ShapeMismatch, "saw 140 bytes .*expected at most 110"),
        (Piece(shard_id=1, offset_bytes=10, data=b"x", checksum=1), ChecksumMismatch, "CRC-32"),
    ],
)
def test_a_piece_that_is_not_the_next_one_is_refused(
    bad: Piece, kind: type[ShoalError], fragment: str
) -> None:
    """A refused piece leaves a gap, repeats, or is empty, too long or corrupted."""
    assembler = ChunkAssembler(SHARD)
    assembler.take(piece(0, 10))
    with pytest.raises(kind, match=fragment):
        assembler.take(bad)
    assert not assembler.is_complete


def test_a_piece_with_bytes_of_an_absent_block_is_refused() -> None:
    """The error has the number of bytes that were expected."""
    assembler = ChunkAssembler(SHARD, absent_blocks=(1,))
    with pytest.raises(ShapeMismatch, match="at most 40"):
        assembler.take(piece(0, 80))


def test_the_error_for_a_truncated_shard_has_both_lengths() -> None:
    """The lengths are the bytes received and the bytes expected."""
    assembler = ChunkAssembler(SHARD)
    assembler.take(piece(0, 100))
    assert "saw 100 bytes; expected 120" in str(assembler.truncated())


def test_a_reservation_is_returned_to_the_budget() -> None:
    """A call beyond the budget is refused, unless no other has a reservation."""
    budget = Budget(100)
    with Reservation(budget) as first:
        first.reserve(1, 400)
        first.reserve(1, 400)
        with Reservation(budget) as second, pytest.raises(Overloaded, match="400 bytes held"):
            second.reserve(1, 10)
        first.release(1)
        with Reservation(budget) as third:
            third.reserve(1, 60)
            first.reserve(2, 40)
    budget.reserve(101)
