"""Weights of shards: by their size and by the bytes pushed to them."""

from shoal_server.core.shards.loads import UNIT, weights


def test_weights_without_pushes_follow_sizes() -> None:
    """Shards of an idle job are spread by their sizes."""
    assert weights({0: 100, 1: 300}, {}, {}) == {0: UNIT // 4, 1: 3 * UNIT // 4}


def test_pushes_in_proportion_to_sizes_change_no_weight() -> None:
    """Dense shards get such pushes."""
    assert weights({0: 100, 1: 300}, {}, {0: 500, 1: 1500}) == weights({0: 100, 1: 300}, {}, {})


def test_a_hot_shard_weighs_more() -> None:
    """One of two equal shards gets nine times as many bytes as the other."""
    found = weights({0: 100, 1: 100}, {0: 1000, 1: 1000}, {0: 1900, 1: 1100})
    assert found == {0: 700_000, 1: 300_000}


def test_the_count_of_a_shard_that_moved_starts_over() -> None:
    """A lower count than the last one is the new primary's: that many bytes were pushed since."""
    found = weights({0: 100, 1: 100}, {0: 9000, 1: 0}, {0: 50, 1: 150})
    assert found == {0: 375_000, 1: 625_000}
