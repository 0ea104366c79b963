"""Shard ids as bits, as messages carry them."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_server.core.shards.steps import from_bits, to_bits


@given(st.frozensets(st.integers(0, 5000)))
def test_shard_ids_are_restored_from_their_bits(shards: frozenset[int]) -> None:
    """The bits take as few bytes as the highest id needs."""
    bits = to_bits(shards)
    assert from_bits(bits) == shards
    assert len(bits) == (max(shards) // 8 + 1 if shards else 0)
