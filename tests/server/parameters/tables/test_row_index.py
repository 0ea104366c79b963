"""The index finds the row of each id after any insertions and removals."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_proto.row_hash import mix64 as mix64_of_one
from shoal_proto.row_hash import shard_of
from shoal_server.parameters.tables.hashing import hash_ids, mix64, shards_of
from shoal_server.parameters.tables.index import RowIndex

IDS = st.integers(-(2**63), 2**63 - 1)
# Few ids that differ in low bits only, and all others.
MIXED_IDS = st.one_of(st.integers(0, 40), IDS)


@settings(deadline=None)
@given(st.lists(IDS, min_size=1, max_size=50), st.integers(1, 1000))
def test_arrays_are_hashed_as_single_ids(ids: list[int], num_shards: int) -> None:
    """A client without arrays sends a row to the same shard."""
    rows = np.array(ids, np.int64)
    assert hash_ids(rows).tolist() == [mix64_of_one(i % 2**64) for i in ids]
    assert shards_of(rows, num_shards).tolist() == [shard_of(i, num_shards) for i in ids]


def test_the_hash_is_what_it_always_was() -> None:
    """Positions of rows depend on it: it must never change. From SplitMix64 with seed 0."""
    assert mix64_of_one(0) == 0xE220A8397B1DCDAF
    assert mix64(np.array([0x9E3779B97F4A7C15], np.uint64)).tolist() == [0x6E789E6AA1B965F4]


def test_rows_spread_evenly_over_shards() -> None:
    """Adjacent ids are spread too."""
    counts = np.bincount(shards_of(np.arange(64_000, dtype=np.int64), 64), minlength=64)
    assert counts.min() > 850
    assert counts.max() < 1150


STEPS = st.lists(st.tuples(st.sets(MIXED_IDS, max_size=40), st.booleans()), max_size=12)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_it_is_a_dictionary(steps: list[tuple[set[int], bool]]) -> None:
    """The index equals a dict after any mixture of insertions and removals."""
    index, model, top = RowIndex(), dict[int, int](), 0
    for ids, is_removal in steps:
        if is_removal:
            gone = sorted(ids & model.keys())
            index.remove(np.array([model.pop(i) for i in gone], np.int64))
        else:
            new = sorted(ids - model.keys())
            rows = np.arange(top, top + len(new))
            top += len(new)
            index.insert(np.array(new, np.int64), rows)
            model.update(zip(new, rows.tolist(), strict=True))
        asked = sorted(ids | model.keys())
        found = index.find(np.array(asked, np.int64)).tolist()
        assert found == [model.get(i, -1) for i in asked]
        assert len(index) == len(model)


def test_rows_that_come_and_go_for_ever_take_no_more_room() -> None:
    """Slots of removed rows are used again or cleaned up."""
    index = RowIndex()
    for round_number in range(200):
        ids = np.arange(round_number * 100, round_number * 100 + 100, dtype=np.int64)
        index.insert(ids, np.arange(100))
        index.remove(index.find(ids))
    assert len(index) == 0
    assert index.num_bytes < 8192
