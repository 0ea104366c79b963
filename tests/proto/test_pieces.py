"""Pieces read and written in place equal those of protobuf, for any content."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from shoal_proto import pieces
from shoal_proto.checksum import crc32
from shoal_proto.v1.parameters_pb2 import Piece, PushHeader, PushReply, PushRequest, ShardData

FIELDS = {PushRequest: pieces.PUSH_REQUEST, PushReply: pieces.PUSH_REPLY, ShardData: 2}
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([2**14 - 20, 2**14, 2**16]))
MARK = b"shoal-mark"


@given(
    kind=st.sampled_from(list(FIELDS)),
    shard_id=st.integers(0, 2**32 - 1),
    offset_bytes=st.one_of(st.integers(0, 2**22), st.integers(0, 2**64 - 1)),
    size=SIZES,
    checksum=st.integers(0, 2**32 - 1),
)
def test_protobuf_reads_written_pieces(
    kind: type[PushRequest | PushReply | ShardData],
    shard_id: int,
    offset_bytes: int,
    size: int,
    checksum: int,
) -> None:
    """Readers of both kinds get the same, and the data are aligned."""
    parts = (MARK, memoryview(bytes(size)))
    data = MARK + bytes(size)
    encoded = pieces.encode(FIELDS[kind], shard_id, offset_bytes, parts, checksum)
    expected = Piece(shard_id=shard_id, offset_bytes=offset_bytes, data=data, checksum=checksum)
    assert kind.FromString(encoded).piece == expected
    read = pieces.PieceDecoder(FIELDS[kind], kind.FromString)(encoded)
    assert isinstance(read, pieces.OnlyPiece)
    seen = read.piece
    assert (seen.shard_id, seen.offset_bytes) == (shard_id, offset_bytes)
    assert (bytes(seen.data), seen.checksum) == (data, checksum)
    if offset_bytes < 2**32:
        assert encoded.index(MARK) % pieces.ALIGNMENT == 0


@given(
    shard_id=st.integers(0, 2**32 - 1),
    offset_bytes=st.integers(0, 2**64 - 1),
    data=st.binary(max_size=300),
    checksum=st.integers(0, 2**32 - 1),
)
def test_pieces_written_by_protobuf_are_read(
    shard_id: int, offset_bytes: int, data: bytes, checksum: int
) -> None:
    """A client in any language may push."""
    piece = Piece(shard_id=shard_id, offset_bytes=offset_bytes, data=data, checksum=checksum)
    read = pieces.PieceDecoder(pieces.PUSH_REQUEST, PushRequest.FromString)(
        PushRequest(piece=piece).SerializeToString()
    )
    assert (read.piece.shard_id, read.piece.offset_bytes) == (shard_id, offset_bytes)
    assert (bytes(read.piece.data), read.piece.checksum) == (data, checksum)


def test_other_messages_are_parsed_by_protobuf() -> None:
    """A header is not a piece."""
    message = PushRequest(header=PushHeader(sequence=7))
    read = pieces.PieceDecoder(pieces.PUSH_REQUEST, PushRequest.FromString)(
        message.SerializeToString()
    )
    assert read == message


@given(st.data())
def test_damaged_messages_are_read_as_protobuf_reads_them(choice: st.DataObject) -> None:
    """A message cut short, or with a changed byte, is an error or exactly what protobuf makes of
    it."""
    encoded = bytearray(pieces.encode(pieces.PUSH_REQUEST, 3, 1000, (b"abcdefgh" * 9,), 77))
    if choice.draw(st.booleans()):
        del encoded[choice.draw(st.integers(0, len(encoded) - 1)) :]
    else:
        encoded[choice.draw(st.integers(0, 30))] ^= choice.draw(st.integers(1, 255))
    decode = pieces.PieceDecoder(pieces.PUSH_REQUEST, PushRequest.FromString)
    try:
        expected = PushRequest.FromString(bytes(encoded))
    except DecodeError:
        with pytest.raises(DecodeError):
            decode(bytes(encoded))
        return
    read = decode(bytes(encoded))
    assert (read.piece.shard_id, bytes(read.piece.data)) == (
        expected.piece.shard_id,
        expected.piece.data,
    )


def test_the_checksum_is_that_of_zlib() -> None:
    """The expected value is the check value of CRC-32's definition."""
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(b"6789", crc32(b"12345")) == 0xCBF43926
