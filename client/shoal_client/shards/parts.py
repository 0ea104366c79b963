"""What a call sends for one shard, whatever carries it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Pieces = Iterable[tuple[int, Sequence[memoryview]]]
"""Offset in the shard, and the caller's memory that holds the bytes from there on."""


@dataclass(frozen=True, slots=True)
class Part:
    """One shard of a call."""

    shard_id: int
    num_bytes: int
    """What its pieces, or the values that come back, have at most."""
    pieces: Callable[[int], Pieces]
    """In order, of at most so many bytes each."""
