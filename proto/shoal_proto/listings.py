"""Listings: the lines from which a digest in a proposal was computed, packed.

If two digests differ, the coordinator names the first line that differs. A packed listing is text,
deflated. A line "=PATTERN" defines the next pattern, counted from 0: a line's text without its
numbers. Any other line stands for one line of the listing: the number of its pattern, then the
difference of each of its numbers from the same number in the last line of that pattern. If a
listing would exceed MAX_LISTING_BYTES, digests of blocks of its lines are packed instead.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from shoal_proto.deflated import inflate

MAX_LISTING_BYTES = 48 * 1024
_MAX_CODED_BYTES = 8 << 20
_MAX_LISTED_CHARACTERS = 32 << 20
"""Larger listings are not read."""
_MAX_BLOCKS = 1024
_MAX_LINE_CHARACTERS = 1000
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,14})(?![0-9])")
"""Numbers of up to 15 digits without leading zeros, which packing would lose."""
_GAP = "\x00"
_BREAKS = re.compile(r"[\x00\r\n\v\f\x1c-\x1e\x85\u2028\u2029\ud800-\udfff]")


class UnreadableListing(ValueError):
    """Bytes that `pack` did not write, or whose lines are too long together."""


@dataclass(frozen=True)
class PackedListing:
    """A listing as in a proposal."""

    packed: bytes

    def lines(self) -> Sequence[str] | None:
        """Return the lines; None if they cannot be read."""
        try:
            return unpack(self.packed)
        except UnreadableListing:
            return None


def pack(lines: Iterable[str]) -> bytes:
    """Pack lines into at most MAX_LISTING_BYTES."""
    listed = [_BREAKS.sub(" ", line)[:_MAX_LINE_CHARACTERS] for line in lines]
    packed = _pack(listed)
    num_blocks = _MAX_BLOCKS
    while len(packed) > MAX_LISTING_BYTES:
        packed = _pack(_in_blocks(listed, num_blocks))
        num_blocks //= 2
    return packed


def unpack(packed: bytes) -> list[str]:
    """Return the lines of a listing. Raises UnreadableListing."""
    try:
        coded = inflate(packed, _MAX_CODED_BYTES).decode()
        return _decode(coded.split("\n") if coded else [])
    except (ValueError, IndexError) as error:
        raise UnreadableListing(str(error)) from error


def _pack(lines: Sequence[str]) -> bytes:
    coded: list[str] = []
    known: dict[str, int] = {}
    last: list[list[int]] = []
    for line in lines:
        pattern = _NUMBER.sub(_GAP, line)
        numbers = [int(each) for each in _NUMBER.findall(line)]
        number = known.get(pattern)
        if number is None:
            number = known[pattern] = len(last)
            last.append([0] * len(numbers))
            coded.append(f"={pattern}")
        changes = (now - before for now, before in zip(numbers, last[number], strict=True))
        coded.append(" ".join(map(str, (number, *changes))))
        last[number] = numbers
    return zlib.compress("\n".join(coded).encode(), 9)


def _decode(coded: Sequence[str]) -> list[str]:
    patterns: list[list[str]] = []
    last: list[list[int]] = []
    lines = []
    num_left = _MAX_LISTED_CHARACTERS
    for each in coded:
        if each.startswith("="):
            patterns.append(each[1:].split(_GAP))
            last.append([0] * (len(patterns[-1]) - 1))
            continue
        number, *changes = map(int, each.split(" "))
        numbers = [before + by for before, by in zip(last[number], changes, strict=True)]
        last[number] = numbers
        parts = patterns[number]
        line = parts[0] + "".join(f"{n}{part}" for n, part in zip(numbers, parts[1:], strict=True))
        lines.append(line)
        num_left -= len(line)
        if num_left < 0:
            raise UnreadableListing("its lines are too long")
    return lines


def _in_blocks(lines: Sequence[str], num_blocks: int) -> list[str]:
    size = -(-len(lines) // num_blocks)
    blocks = (lines[start : start + size] for start in range(0, len(lines), size))
    return [
        f"{len(block)} entries from '{block[0][:100]}' on:"
        f" {sha256(repr(block).encode()).hexdigest()[:8]}"
        for block in blocks
    ]
