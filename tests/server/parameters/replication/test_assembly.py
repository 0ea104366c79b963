"""Requests of other servers take no more memory than the limit, whatever sizes they announce."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shoal_proto.checksum import crc32
from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import OnlyPiece, ReadPiece
from shoal_proto.v1 import replication_pb2 as pb
from shoal_proto.v1.parameters_pb2 import Piece
from shoal_server.parameters.replication.wire.frames import INLINE_BYTES, RequestAssembler
from shoal_server.parameters.shard.chunk_assembler import Budget
from shoal_server.parameters.shard.memory import Memory

LIMIT_BYTES = 8 << 20
PIECE = bytes(1 << 20)


def memory() -> Memory:
    """Return the memory of a server without shards."""
    return Memory(LIMIT_BYTES, SimpleNamespace(shards=list), Budget(1))  # type: ignore[arg-type]


def record(num_bytes: int) -> pb.FollowRequest:
    start = pb.RecordStart(job="j", shard_id=1, epoch=1, num_bytes=num_bytes)
    return pb.FollowRequest(record=start)


def pieces(num_bytes: int) -> Iterator[pb.FollowRequest]:
    for _ in range(0, num_bytes, len(PIECE)):
        yield pb.FollowRequest(bytes=Piece(data=PIECE, checksum=crc32(PIECE)))


def test_the_pieces_of_a_record_count_until_it_is_whole() -> None:
    mine = memory()
    assembly = RequestAssembler(mine, lambda key, image: True)
    assert assembly.take(record(4 << 20)) is None
    *first, last = pieces(4 << 20)
    for piece in first:
        assert assembly.take(piece) is None
    assert 0 <= mine.held_bytes - (3 << 20) < 3 * 1024
    whole = assembly.take(last)
    assert whole is not None and not whole.why_dropped
    assert sum(map(len, whole.parts)) == 4 << 20
    assert mine.held_bytes == 0


def test_a_record_beyond_the_memory_is_dropped() -> None:
    """The pieces of the record are not kept, and the request after it is read."""
    mine = memory()
    assembly = RequestAssembler(mine, lambda key, image: True)
    assert assembly.take(record(64 << 20)) is None
    assert mine.held_bytes == 0, "an announced size takes no memory"
    most_bytes = 0
    for piece in pieces(64 << 20):
        whole = assembly.take(piece)
        most_bytes = max(most_bytes, mine.held_bytes)
    assert most_bytes <= LIMIT_BYTES
    assert whole is not None and whole.why_dropped and sum(map(len, whole.parts)) == 0
    assert mine.held_bytes == 0
    small = pb.RecordStart(job="j", shard_id=1, epoch=1, num_bytes=1)
    small.first.data, small.first.checksum = b"x", crc32(b"x")
    after = assembly.take(pb.FollowRequest(record=small))
    assert after is not None and after.parts == [b"x"]


@pytest.mark.parametrize("piece_bytes", [100, 5000, INLINE_BYTES])
def test_small_pieces_count_as_well(piece_bytes: int) -> None:
    """A stream never has more uncounted bytes than one piece of the usual size."""
    mine = memory()
    assembly = RequestAssembler(mine, lambda key, image: True)
    assert assembly.take(record(8 << 30)) is None
    data = bytes(piece_bytes)
    piece = pb.FollowRequest(bytes=Piece(data=data, checksum=crc32(data)))
    taken_bytes = most_bytes = 0
    while mine.held_bytes or not most_bytes:  # until the record is dropped
        most_bytes = max(most_bytes, mine.held_bytes)
        assert taken_bytes - mine.held_bytes <= INLINE_BYTES
        assembly.take(piece)
        taken_bytes += piece_bytes
    assert LIMIT_BYTES // 4 < taken_bytes <= LIMIT_BYTES + INLINE_BYTES
    assert mine.held_bytes == 0


def test_bytes_in_the_start_of_a_record_count_as_well() -> None:
    mine = memory()
    streams = [RequestAssembler(mine, lambda key, image: True) for _ in range(8)]
    for stream in streams:
        start = pb.RecordStart(job="j", shard_id=1, epoch=1, num_bytes=1 << 20)
        start.record.row_ids = bytes(2 << 20)
        assert stream.take(pb.FollowRequest(record=start)) is None
    assert 3 * (2 << 20) <= mine.held_bytes <= LIMIT_BYTES
    whole = [stream.take(piece) for stream in streams for piece in pieces(1 << 20)]
    assert sum(each is not None and bool(each.why_dropped) for each in whole) >= 4
    assert mine.held_bytes == 0


def test_a_stream_that_ends_frees_its_memory() -> None:
    mine = memory()
    assembly = RequestAssembler(mine, lambda key, image: True)
    assembly.take(record(4 << 20))
    assembly.take(next(pieces(4 << 20)))
    assert 0 <= mine.held_bytes - (1 << 20) < 1024
    assembly.close()
    assert mine.held_bytes == 0


def test_chunks_of_an_unexpected_image_are_not_kept() -> None:
    wanted = {("j", 1): 7}
    assembly = RequestAssembler(memory(), lambda key, image: wanted.get(key) == image)
    for image, kept in ((6, 0), (7, 2 << 20)):
        start = pb.ChunkStart(job="j", shard_id=1, image=image, num_bytes=2 << 20)
        assert assembly.take(pb.FollowRequest(chunk=start)) is None
        for piece in pieces(2 << 20):
            whole = assembly.take(piece)
        assert whole is not None and sum(map(len, whole.parts)) == kept


def test_a_record_of_an_impossible_size_is_refused() -> None:
    """The refusal comes before memory is allocated."""
    with pytest.raises(MalformedMessage, match="too large"):
        RequestAssembler(memory(), lambda key, image: True).take(record(2**53 - 1))


def lent(data: bytearray, *, offset_bytes: int = 0) -> OnlyPiece:
    """Return a piece in memory that its sender may reuse."""
    return OnlyPiece(ReadPiece(0, offset_bytes, memoryview(data), None, is_shared=True))


def test_a_record_in_one_lent_piece_is_borrowed_and_can_be_copied() -> None:
    shared = bytearray(PIECE)
    assembly = RequestAssembler(memory(), lambda key, image: True)
    assembly.take(record(len(shared)))
    whole = assembly.take(lent(shared))
    assert whole is not None and whole.is_borrowed
    own = whole.owned()
    shared[0] = 1
    assert (whole.parts[0][0], own.parts[0][0]) == (1, 0)
    assert not own.is_borrowed


def test_lent_pieces_of_a_longer_record_or_of_a_chunk_are_copied() -> None:
    """The sender may reuse the first piece's memory before the last one arrives; chunks are
    kept."""
    shared = bytearray(PIECE)
    assembly = RequestAssembler(memory(), lambda key, image: True)
    assembly.take(record(2 * len(shared)))
    assembly.take(lent(shared))
    whole = assembly.take(lent(shared, offset_bytes=len(shared)))
    start = pb.ChunkStart(job="j", shard_id=1, image=7, num_bytes=len(shared))
    assembly.take(pb.FollowRequest(chunk=start))
    chunk = assembly.take(lent(shared))
    shared[0] = 1
    for each in (whole, chunk):
        assert each is not None and not each.is_borrowed
        assert {part[0] for part in each.parts} == {0}
