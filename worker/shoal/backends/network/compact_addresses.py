"""The addresses that Gloo's ranks announce, as long for thousands of ranks as for a few.

A rank announces its listener and, for each of N peers, the number of the pair that the two are:
8 N bytes, in which each number is mostly one more than the number before it. Written as runs of
equal differences they take a few bytes. Any other value is kept as it is, behind one byte.
"""

import struct

import numpy as np

from shoal_proto.errors import MalformedMessage

_WORD_BYTES = 8
_AS_IT_IS, _AS_RUNS = b"\0", b"\1"
_REST = struct.Struct("<B")
"""How many bytes stand before the first whole word, counted from the end."""
_RUNS = np.dtype([("difference", "<i8"), ("count", "<u4")])
MAX_WORDS = 1 << 20
"""Of a value: of a million ranks."""


def compact(value: bytes) -> bytes:
    """Another form of the value: of at most one byte more, and of few bytes for an address."""
    rest = len(value) % _WORD_BYTES
    words = np.frombuffer(value, dtype="<i8", offset=rest)
    differences = np.diff(words, prepend=np.int64(0))
    starts = np.flatnonzero(np.append(True, differences[1:] != differences[:-1]))[: len(words)]
    runs = np.empty(len(starts), dtype=_RUNS)
    runs["difference"] = differences[starts]
    runs["count"] = np.diff(starts, append=len(words))
    told = _AS_RUNS + _REST.pack(rest) + value[:rest] + runs.tobytes()
    return told if len(words) <= MAX_WORDS and len(told) <= len(value) else _AS_IT_IS + value


def expand(told: bytes) -> bytes:
    """What was made compact. Raises MalformedMessage."""
    form, body = told[:1], told[1:]
    if form == _AS_IT_IS:
        return body
    if form != _AS_RUNS or not body:
        raise _malformed(told)
    head = 1 + body[0]
    if body[0] >= _WORD_BYTES or (len(body) - head) % _RUNS.itemsize or len(body) < head:
        raise _malformed(told)
    runs = np.frombuffer(body, dtype=_RUNS, offset=head)
    if runs["count"].sum(dtype=np.uint64) > MAX_WORDS:
        raise _malformed(told)
    words = np.cumsum(np.repeat(runs["difference"], runs["count"]), dtype="<i8")
    return body[1:head] + words.tobytes()


def _malformed(told: bytes) -> MalformedMessage:
    return MalformedMessage(
        "a rank's address cannot be read", seen=repr(told[:32]), expected="as `compact` writes it"
    )
