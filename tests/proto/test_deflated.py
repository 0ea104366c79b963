"""Deflated bytes of a peer or a store are inflated up to a limit."""

import zlib

import pytest

from shoal_proto.deflated import inflate

DATA = bytes(range(256)) * 4


@pytest.mark.parametrize("limit", [len(DATA), len(DATA) + 1, 1 << 30])
def test_bytes_within_the_limit_are_restored(limit: int) -> None:
    assert inflate(zlib.compress(DATA), limit) == DATA


@pytest.mark.parametrize(
    ("packed", "limit"),
    [
        (zlib.compress(DATA), len(DATA) - 1),
        (zlib.compress(bytes(1 << 24)), 1 << 10),
        (zlib.compress(DATA)[:-1], len(DATA)),
        (b"", 8),
        (b"no deflated bytes", 1 << 10),
    ],
    ids=["one too many", "a bomb", "cut off", "nothing", "plain"],
)
def test_other_bytes_are_refused(packed: bytes, limit: int) -> None:
    with pytest.raises(ValueError, match=r"inflate to more than|Error -"):
        inflate(packed, limit)
