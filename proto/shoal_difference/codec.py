"""The difference between two versions of the same bytes, exact for every bit pattern.

In one training step few 16-bit weights change, and most of them to the next representable number.
So for elements of 16 bits a difference has the numbers of unchanged elements between changes, and
the distance of each change, counted in representable numbers. For other elements it has the XOR of
old and new bytes, in one plane for each byte of an element.

A difference is MAGIC, then spans. A span is its header (`_SPAN`), the length of each of its streams
(`_LENGTH`), and the streams, each a zstandard frame. Integers are little-endian.

The caller verifies base and target by their digests.
"""

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import zstandard

from shoal_proto.errors import MalformedMessage
from shoal_proto.pieces import Buffer

MAGIC = b"SHDIFF01"
SPAN_BYTES = 64 * 1024 * 1024
"""Each span is encoded separately, which bounds the memory needed."""
CACHED_ELEMENTS = 256 * 1024
"""Elements that fit into the processor's cache."""
LEVEL = 1
"""Level of zstandard. Higher levels take several times as long, and save a few percent."""
SKIP = 65535
"""A gap number of this value means: this many unchanged elements, and the gap continues in the next
number."""
FAR = -128
"""Value in the stream of 8-bit distances if the distance is outside of -127 to 127: it is then the
next one in the stream of 16-bit distances."""
NUM_SAMPLES, SAMPLE_ELEMENTS = 256, 4096
SIZES = (1, 2, 4, 8, 16)

Shorts = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


class _Kind(IntEnum):
    SAME = 0
    """Same as the base; no streams."""
    DISTANCES = 1
    """Four streams: low bytes of gaps, high bytes of gaps, distances of 8 bits, and of 16 bits."""
    PLANES = 2
    """A stream for each byte of an element: the XOR of old and new."""


_SPAN = struct.Struct("<BBxxxxxxQ")
"""Kind, number of streams, bytes of the span. The streams' lengths follow."""
_LENGTH = struct.Struct("<Q")


def encode(base: Buffer, target: Buffer, elements: Iterable[tuple[int, int]]) -> list[bytes]:
    """Return the difference, in parts to be joined. `elements`: runs (bytes of an element, bytes of
    the run) that make up both buffers; a wrong size of an element only makes the difference larger.
    Raises ValueError if the runs together have another size than either buffer.
    """
    old, new = _bytes(base), _bytes(target)
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    parts, start = [MAGIC], 0
    for size, num_bytes in elements:
        for at in range(start, start + num_bytes, SPAN_BYTES):
            stop = min(at + SPAN_BYTES, start + num_bytes)
            parts += _encode_span(old[at:stop], new[at:stop], size, compressor)
        start += num_bytes
    if not start == len(old) == len(new):
        raise ValueError(f"elements of {start} bytes, base of {len(old)}, target of {len(new)}")
    return parts


def changed_share(base: Buffer, target: Buffer) -> float:
    """Estimate the fraction of 16-bit elements that differ, from samples."""
    num_bytes = len(memoryview(target)) // 2 * 2
    if not num_bytes:
        return 0.0
    old, new = (np.frombuffer(each, "<u2", num_bytes // 2) for each in (base, target))
    step = max(len(old) // NUM_SAMPLES, SAMPLE_ELEMENTS)
    starts = range(0, len(old), step)
    ends = [slice(start, start + SAMPLE_ELEMENTS) for start in starts]
    differ = sum(int(np.count_nonzero(old[each] != new[each])) for each in ends)
    return differ / sum(len(old[each]) for each in ends)


def apply(base: Buffer, difference: Buffer, into: memoryview) -> None:
    """Write the target into `into`, which is as large as the base and does not overlap it. Raises
    MalformedMessage if `difference` is damaged, or was made for buffers of another size.
    """
    old, new = _bytes(base), _bytes(into)
    view = memoryview(difference)
    if view[: len(MAGIC)] != MAGIC:
        raise _malformed(f"it begins with {bytes(view[: len(MAGIC)])!r}", repr(MAGIC))
    decompressor = zstandard.ZstdDecompressor()
    start = 0
    for kind, num_bytes, streams in _spans(view[len(MAGIC) :]):
        stop = start + num_bytes
        if stop > len(old):
            raise _malformed(f"spans up to byte {stop}", f"{len(old)} bytes")
        plain = [_decompressed(each, num_bytes, decompressor) for each in streams]
        before, after = old[start:stop], new[start:stop]
        if kind is _Kind.PLANES:
            _apply_planes(before, after, plain)
        else:
            after[:] = before
            if kind is _Kind.DISTANCES:
                _apply_distances(after, plain)
        start = stop
    if not start == len(old) == len(new):
        raise _malformed(f"spans of {start} bytes", f"{len(old)}, the size of base and target")


def _encode_span(
    old: Bytes, new: Bytes, size: int, compressor: zstandard.ZstdCompressor
) -> list[bytes]:
    if len(old) % size or size not in SIZES:
        size = 1
    streams = _distances(old, new) if size == 2 else _planes(old, new, size)
    packed = [compressor.compress(stream) for stream in streams]
    kind = _Kind.SAME if not packed else _Kind.DISTANCES if size == 2 else _Kind.PLANES
    head = _SPAN.pack(kind, len(packed), len(old))
    return [head, *(_LENGTH.pack(len(each)) for each in packed), *packed]


def _spans(view: memoryview) -> Iterator[tuple[_Kind, int, list[memoryview]]]:
    at = 0
    try:
        while at < len(view):
            number, count, num_bytes = _SPAN.unpack_from(view, at)
            at += _SPAN.size
            lengths = [_LENGTH.unpack_from(view, at + i * _LENGTH.size)[0] for i in range(count)]
            at += count * _LENGTH.size
            kind = _Kind(number)
            if count != {_Kind.SAME: 0, _Kind.DISTANCES: 4}.get(kind, count):
                raise _malformed(f"{count} streams of kind {kind.name}", "0 or 4")
            streams = []
            for length in lengths:
                streams.append(view[at : at + length])
                at += length
            if at > len(view):
                raise _malformed(f"{len(view)} bytes", f"at least {at}")
            yield kind, num_bytes, streams
    except (struct.error, ValueError) as error:
        if isinstance(error, MalformedMessage):
            raise
        raise _malformed(repr(error), "spans") from error


# --- elements of 16 bits ---


def _distances(old: Bytes, new: Bytes) -> list[Buffer]:
    """Return four streams; none if nothing changed."""
    positions, before, after = _changes(old.view("<u2"), new.view("<u2"))
    if not len(positions):
        return []
    gaps = _gaps(positions)
    # Modulo 2^16: exact for any two bit patterns.
    distances = (_ranked(after) - _ranked(before)).view(np.int16)
    near = distances.astype(np.int8)
    is_far = (near != distances) | (near == FAR)
    near[is_far] = FAR
    halves = gaps.view(np.uint8).reshape(-1, 2)
    return [
        np.ascontiguousarray(halves[:, 0]).data,
        np.ascontiguousarray(halves[:, 1]).data,
        near.view(np.uint8).data,
        distances[is_far].astype("<i2").view(np.uint8).data,
    ]


def _changes(old: Shorts, new: Shorts) -> tuple[Positions, Shorts, Shorts]:
    differs = np.empty(CACHED_ELEMENTS, np.bool_)
    found = []
    for start in range(0, len(old), CACHED_ELEMENTS):
        before, after = (each[start : start + CACHED_ELEMENTS] for each in (old, new))
        np.not_equal(before, after, out=differs[: len(before)])
        here = np.flatnonzero(differs[: len(before)])
        found.append((here + start, before[here], after[here]))
    positions, before, after = (np.concatenate(each) for each in zip(*found, strict=True))
    return positions, before, after


def _gaps(positions: Positions) -> Shorts:
    """Return the number of unchanged elements before each changed one, in 16 bits; see SKIP."""
    gaps = np.diff(positions, prepend=-1) - 1
    if gaps.max() < SKIP:
        return gaps.astype("<u2")
    skips, rest = np.divmod(gaps, SKIP)
    ends = np.cumsum(skips + 1) - 1
    numbers = np.full(ends[-1] + 1, SKIP, "<u2")
    numbers[ends] = rest
    return numbers


def _apply_distances(after: Bytes, streams: list[Bytes]) -> None:
    low, high, near, far = streams
    if len(low) != len(high) or len(far) % 2 or len(after) % 2:
        raise _malformed(f"{len(low)} low and {len(high)} high bytes", "equal numbers")
    gaps = np.empty((len(low), 2), np.uint8)
    gaps[:, 0], gaps[:, 1] = low, high
    numbers = gaps.view("<u2").reshape(-1)
    ends = numbers != SKIP
    positions = np.cumsum(numbers, dtype=np.int64)[ends]
    positions += np.arange(len(positions))
    distances = near.view(np.int8).astype(np.int16)
    is_far = distances == FAR
    values = after.view("<u2")
    if len(positions) != len(distances) or np.count_nonzero(is_far) != len(far) // 2:
        raise _malformed(f"{len(distances)} distances, {len(far) // 2} far", f"{len(positions)}")
    if len(positions) and positions[-1] >= len(values):
        raise _malformed(f"a change of element {positions[-1]}", f"{len(values)} elements")
    distances[is_far] = far.view("<i2")
    values[positions] = _ranked(_ranked(values[positions]) + distances.view(np.uint16))


def _ranked(values: Shorts) -> Shorts:
    """Map the bit patterns of 16-bit floating-point numbers to integers in the order of the
    numbers, in two's complement: -0.0 is just below 0.0. Its own inverse."""
    signs = (values.view(np.int16) >> np.int16(15)).view(np.uint16)
    ranked: Shorts = values ^ (signs & np.uint16(0x7FFF))
    return ranked


# --- elements of other sizes ---


def _planes(old: Bytes, new: Bytes, size: int) -> list[Buffer]:
    """Return a stream for each byte of an element; none if nothing changed."""
    changed = old ^ new
    if not changed.any():
        return []
    return [np.ascontiguousarray(changed[byte::size]).data for byte in range(size)]


def _apply_planes(before: Bytes, after: Bytes, streams: list[Bytes]) -> None:
    size = len(streams)
    if not size or any(len(stream) * size != len(before) for stream in streams):
        raise _malformed(f"{size} planes of {sum(map(len, streams))} bytes", f"{len(before)}")
    for byte, stream in enumerate(streams):
        np.bitwise_xor(before[byte::size], stream, out=after[byte::size])


# --- bytes ---


def _bytes(buffer: Buffer) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def _decompressed(
    stream: memoryview, num_bytes: int, decompressor: zstandard.ZstdDecompressor
) -> Bytes:
    try:
        size = zstandard.frame_content_size(stream)
        if not 0 <= size <= num_bytes:
            raise _malformed(f"a stream of {size} bytes", f"at most {num_bytes}")
        return np.frombuffer(decompressor.decompress(stream), np.uint8)
    except zstandard.ZstdError as error:
        raise _malformed(repr(error), "a frame of zstandard") from error


def _malformed(seen: str, expected: str) -> MalformedMessage:
    return MalformedMessage("not a difference of two versions", seen=seen, expected=expected)
