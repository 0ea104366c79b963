"""Frames of the bulk transport, however a stream is divided and whichever byte changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_proto import MAX_PIECE_BYTES, bulk
from shoal_proto.bulk import BUFFER_BYTES, HEADER_BYTES, FrameKind, FrameReader
from shoal_proto.checksum import crc32
from shoal_proto.errors import ChecksumMismatch, MalformedMessage, ShoalError

BODIES = st.one_of(st.binary(max_size=200), st.sampled_from([bytes(BUFFER_BYTES), b"x" * 150_000]))


def a_piece(body: bytes) -> bytes:
    head = bulk.header(
        FrameKind.PIECE, shard_id=3, offset_bytes=8, num_bytes=len(body), checksum=crc32(body)
    )
    return head + body


def read_all(stream: bytes, sizes: list[int]) -> list[tuple[FrameKind, int, int, bytes]]:
    """The frames of a stream that arrives in parts of these sizes, repeated in turn."""
    reader = FrameReader()
    frames, at, turn = [], 0, 0
    while at < len(stream):
        space = reader.space()
        size = min(sizes[turn % len(sizes)], len(space), len(stream) - at)
        space[:size] = stream[at : at + size]
        reader.received(size)
        at, turn = at + size, turn + 1
        while (frame := reader.next()) is not None:
            frames.append((frame.kind, frame.offset_bytes, frame.at, bytes(frame.body)))
    return frames


@pytest.mark.long
@given(
    bodies=st.lists(BODIES, min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=5),
)
def test_frames_of_a_divided_stream_are_complete(bodies: list[bytes], sizes: list[int]) -> None:
    stream, expected = b"", []
    for body in bodies:
        stream += (
            bulk.message(FrameKind.PUSH, body)
            + bulk.header(FrameKind.FREE_SLOT, at=5)
            + a_piece(body)
        )
        expected += [
            (FrameKind.PUSH, 0, 0, body),
            (FrameKind.FREE_SLOT, 0, 5, b""),
            (FrameKind.PIECE, 8, 0, body),
        ]
    # Parts of one byte would take long for large bodies.
    assert read_all(stream, [max(size, len(stream) // 500) for size in sizes]) == expected


@given(at=st.integers(0, HEADER_BYTES + 99), flipped=st.integers(1, 255))
def test_a_message_with_a_changed_byte_is_refused(at: int, flipped: int) -> None:
    stream = bytearray(bulk.message(FrameKind.PUSH, b"y" * 100))
    stream[at] ^= flipped
    with pytest.raises(ChecksumMismatch):
        read_all(bytes(stream), [1000])


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (bulk.header(FrameKind.PIECE, num_bytes=MAX_PIECE_BYTES + 1), "too large"),
        (bulk.header(FrameKind.PUSH, num_bytes=1 << 40), "too large"),
        (bulk.header(99), "unknown kind"),  # type: ignore[arg-type]
    ],
)
def test_invalid_headers_are_refused(stream: bytes, words: str) -> None:
    with pytest.raises(MalformedMessage, match=words):
        read_all(stream, [1000])


@pytest.mark.parametrize("kind", sorted(set(FrameKind) - {FrameKind.HELLO}))
def test_an_unexpected_first_frame_allocates_no_memory(kind: FrameKind) -> None:
    """A header costs an unknown sender 40 bytes, and may announce megabytes."""
    reader = FrameReader(first=FrameKind.HELLO)
    stream = bulk.header(kind, num_bytes=MAX_PIECE_BYTES)
    reader.space()[: len(stream)] = stream
    reader.received(len(stream))
    with pytest.raises(MalformedMessage, match=f"saw a frame of kind {kind.name}"):
        reader.next()
    assert len(reader.space()) <= BUFFER_BYTES


def test_any_frame_may_follow_the_first_one() -> None:
    reader = FrameReader(first=FrameKind.HELLO)
    stream = bulk.message(FrameKind.HELLO, b"key") + bulk.message(FrameKind.PUSH, b"push")
    reader.space()[: len(stream)] = stream
    reader.received(len(stream))
    frames = [reader.next(), reader.next()]
    assert [frame and frame.kind for frame in frames] == [FrameKind.HELLO, FrameKind.PUSH]


def test_an_incomplete_frame_is_not_returned() -> None:
    stream = a_piece(b"z" * 1000)
    assert read_all(stream[:-1], [300]) == []


@given(noise=st.binary(min_size=HEADER_BYTES, max_size=300))
def test_random_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(ShoalError):
        read_all(noise, [1000])


def test_the_checksum_is_that_of_zlib() -> None:
    """The expected value is the check value of CRC-32's definition."""
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(b"6789", crc32(b"12345")) == 0xCBF43926
