"""Packing of many similar values."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_proto.errors import MalformedMessage
from shoal_proto.packing.packed_values import MAX_VALUES_BYTES, pack, unpack


@given(values=st.lists(st.binary(max_size=20), max_size=10))
def test_values_of_any_lengths_are_restored(values: list[bytes]) -> None:
    assert unpack(pack(values)) == values


def test_values_of_a_thousand_ranks_take_a_hundredth() -> None:
    """The values are as Gloo exchanges them: an address, and numbers of the connections to all
    other ranks."""
    numbers = struct.pack("<1000q", *range(1000))
    values = [zlib.crc32(bytes([n % 256, n // 256])).to_bytes(154) + numbers for n in range(1000)]
    assert len(pack(values)) < sum(map(len, values)) / 100


@pytest.mark.parametrize("data", [b"x", zlib.compress(b"\xff\xff")])
def test_an_invalid_packed_answer_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage, match="do not unpack"):
        unpack(data)


@pytest.mark.long
def test_an_answer_that_is_too_large_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(MalformedMessage, match="inflate to more than"):
        unpack(zlib.compress(bytes(MAX_VALUES_BYTES + 1)))
