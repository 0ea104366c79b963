"""Listings are small for any content, and are read back line by line."""

import random
import zlib

import pytest

from shoal_proto.listings import MAX_LISTING_BYTES, UnreadableListing, pack, unpack

LAYER = (
    "attention.query.weight: (1024, 1024) bfloat16",
    "attention.value.weight: (1024, 1024) bfloat16",
    "wide.weight: (4096, 1024) bfloat16",
    "back.weight: (1024, 4096) bfloat16",
    "norm.weight: (1024,) bfloat16",
)


@pytest.mark.long
def test_a_hundred_thousand_parameters_are_listed_each_by_name() -> None:
    """Equal layers make the listing a few kilobytes."""
    lines = [f"parameter layers.{n}.{each}" for n in range(20_000) for each in LAYER]
    packed = pack(lines)
    assert len(packed) < 8 * 1024
    assert unpack(packed) == lines


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["007: 7", "07: 7", "7: 07", "-1: 1.5e-05", "=: 0 1", "\u0667: \u00fc"],
        [f"a{2**70 + n}: {n}" for n in range(3)],
        ["9: 1", "10: 1", "9: 1"],
    ],
)
def test_lines_are_read_back_as_they_were(lines: list[str]) -> None:
    assert unpack(pack(lines)) == lines


def test_line_breaks_within_a_name_make_no_further_lines() -> None:
    assert unpack(pack(["a\nb: 1", "c\x00d: 2", "e\ud800: 3"])) == ["a b: 1", "c d: 2", "e : 3"]


@pytest.mark.long
def test_a_listing_that_stays_too_large_names_blocks() -> None:
    """A block shows its first entry and a digest, so that a difference can be located to a
    block."""
    seed = random.Random(1)
    lines = [f"parameter {seed.getrandbits(128):x}: (4,) float32" for _ in range(100_000)]
    packed = pack(lines)
    assert len(packed) <= MAX_LISTING_BYTES
    blocks = unpack(packed)
    lines[50_000] = lines[50_000].replace("(4,)", "(5,)")
    others = unpack(pack(lines))
    differing = [n for n, pair in enumerate(zip(blocks, others, strict=True)) if len(set(pair)) > 1]
    assert len(differing) == 1
    start = sum(int(each.split(" ")[0]) for each in blocks[: differing[0]])
    assert blocks[differing[0]].startswith(f"98 entries from '{lines[start]}' on: ")
    assert start <= 50_000 < start + 98


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zlib",
        pack(["a: 1", "b: 2"])[:-3],
        zlib.compress(b"5 1"),
        zlib.compress(b"=a\n0 1"),
        zlib.compress(b"=a\x00\n0 x"),
        zlib.compress(b"\xff"),
        zlib.compress(b"0" * (16 << 20)),
        zlib.compress(b"=" + b"a" * (1 << 20) + b"\n0" * (1 << 10)),
    ],
)
def test_bytes_that_are_no_listing_are_refused(packed: bytes) -> None:
    """Bytes that cannot be unpacked are refused, and so is a listing that would unpack to more than
    memory holds."""
    with pytest.raises(UnreadableListing):
        unpack(packed)
