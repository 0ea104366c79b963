"""Weights of shards: by size, until what is pushed tells otherwise."""

from shoal_server.core.shards.loads import UNIT, weights


def test_sizes_count_where_nothing_is_pushed() -> None:
    """A job that rests is spread by what it holds."""
    assert weights({0: 100, 1: 300}, {}, {}) == {0: UNIT // 4, 1: 3 * UNIT // 4}


def test_even_pushes_change_nothing() -> None:
    """Dense shards are pushed to by their size."""
    assert weights({0: 100, 1: 300}, {}, {0: 500, 1: 1500}) == weights({0: 100, 1: 300}, {}, {})


def test_a_hot_shard_weighs_more() -> None:
    """Of two shards of a table, one gets nearly all pushes."""
    found = weights({0: 100, 1: 100}, {0: 1000, 1: 1000}, {0: 1900, 1: 1100})
    assert found == {0: 700_000, 1: 300_000}


def test_a_shard_that_moved_counts_from_anew() -> None:
    """Its new primary has counted less than the old one: that much was pushed at least."""
    found = weights({0: 100, 1: 100}, {0: 9000, 1: 0}, {0: 50, 1: 150})
    assert found == {0: 375_000, 1: 625_000}
