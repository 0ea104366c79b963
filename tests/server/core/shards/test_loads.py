"""Weights of shards: by size, until pushes show otherwise."""

from shoal_server.core.shards.loads import UNIT, weights


def test_sizes_count_where_nothing_is_pushed() -> None:
    """Shards of an idle job are spread by their sizes."""
    assert weights({0: 100, 1: 300}, {}, {}) == {0: UNIT // 4, 1: 3 * UNIT // 4}


def test_even_pushes_change_nothing() -> None:
    """Dense shards get pushes in proportion to their size."""
    assert weights({0: 100, 1: 300}, {}, {0: 500, 1: 1500}) == weights({0: 100, 1: 300}, {}, {})


def test_a_hot_shard_weighs_more() -> None:
    """The first of two shards of a table gets nearly all pushes."""
    found = weights({0: 100, 1: 100}, {0: 1000, 1: 1000}, {0: 1900, 1: 1100})
    assert found == {0: 700_000, 1: 300_000}


def test_a_shard_that_moved_counts_from_anew() -> None:
    """The new primary has counted fewer bytes than the old one: at least these were pushed."""
    found = weights({0: 100, 1: 100}, {0: 9000, 1: 0}, {0: 50, 1: 150})
    assert found == {0: 375_000, 1: 625_000}
