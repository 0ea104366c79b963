"""Compact encoding of the addresses that Gloo's ranks announce: short for any number of ranks.

A rank announces its listener and, for each peer, the number of the connection to that peer. Runs of
numbers with equal differences are stored together.

The first byte of an encoded address is 0 or 1. After 0 comes the address itself; after 1 the number
of bytes before the first word (one byte), these bytes, and the runs (`_RUNS`).
"""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_proto.errors import MalformedMessage

Array = npt.NDArray[Any]

_WORD_BYTES = 8
_UNCHANGED, _AS_RUNS = b"\0", b"\1"
_REST = struct.Struct("<B")
"""Number of bytes before the first word. Words are aligned to the value's end."""
_RUNS = np.dtype([("difference", "<i8"), ("count", "<u4")])
_EDGE_WORDS = 32
"""Number of words kept at each end of a run."""
MAX_WORDS = 1 << 20
"""Limit of a value in words."""


def compact(value: bytes) -> bytes:
    """Encode the value. The result is at most one byte longer."""
    rest = len(value) % _WORD_BYTES
    words = np.frombuffer(value, dtype="<i8", offset=rest)
    differences = np.diff(words, prepend=np.int64(0))
    starts, counts = _runs(differences)
    runs = np.empty(len(starts), dtype=_RUNS)
    runs["difference"] = differences[starts]
    runs["count"] = counts
    packed = _AS_RUNS + _REST.pack(rest) + value[:rest] + runs.tobytes()
    return packed if len(words) <= MAX_WORDS and len(packed) <= len(value) else _UNCHANGED + value


def expand(packed: bytes) -> bytes:
    """Decode what `compact` encoded. Raises MalformedMessage for other bytes."""
    form, body = packed[:1], packed[1:]
    if form == _UNCHANGED:
        return body
    if form != _AS_RUNS or not body:
        raise _malformed(packed)
    head = 1 + body[0]
    if body[0] >= _WORD_BYTES or (len(body) - head) % _RUNS.itemsize or len(body) < head:
        raise _malformed(packed)
    runs = np.frombuffer(body, dtype=_RUNS, offset=head)
    if runs["count"].sum(dtype=np.uint64) > MAX_WORDS:
        raise _malformed(packed)
    words = np.cumsum(np.repeat(runs["difference"], runs["count"]), dtype="<i8")
    return body[1:head] + words.tobytes()


def without_runs(value: bytes) -> bytes:
    """Remove the middle of each long run of connection numbers.

    A listener's address stays in one piece.
    """
    rest = len(value) % _WORD_BYTES
    words = np.frombuffer(value, dtype="<i8", offset=rest)
    starts, counts = _runs(np.diff(words, prepend=np.int64(0)))
    kept, at = [value[:rest]], 0
    for run in np.flatnonzero(counts > 2 * _EDGE_WORDS):
        kept.append(words[at : starts[run] + _EDGE_WORDS].tobytes())
        at = starts[run] + counts[run] - _EDGE_WORDS
    return b"".join([*kept, words[at:].tobytes()])


def _runs(differences: Array) -> tuple[Array, Array]:
    starts = np.flatnonzero(np.append(True, differences[1:] != differences[:-1]))
    starts = starts[: len(differences)]
    return starts, np.diff(starts, append=len(differences))


def _malformed(packed: bytes) -> MalformedMessage:
    return MalformedMessage(
        "a rank's address cannot be read", seen=repr(packed[:32]), expected="an encoded address"
    )
