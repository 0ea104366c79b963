"""The index finds the position of each id's row after any insertions and removals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_proto.row_hash import mix64 as mix64_of_one
from shoal_proto.row_hash import shard_of
from shoal_server.parameters.tables.growing import GrowingTensor
from shoal_server.parameters.tables.hashing import hash_ids, mix64, shards_of
from shoal_server.parameters.tables.index import RowIndex
from shoal_server.parameters.tables.optimizers import StateColumn
from shoal_server.parameters.tables.rows import FIRST_CAPACITY, RowStore

IDS = st.integers(-(2**63), 2**63 - 1)
# Either of a few ids that differ only in low bits, or of all ids.
MIXED_IDS = st.one_of(st.integers(0, 40), IDS)


@settings(deadline=None)
@given(st.lists(IDS, min_size=1, max_size=50), st.integers(1, 1000))
def test_arrays_are_hashed_like_single_ids(ids: list[int], num_shards: int) -> None:
    """Each way of hashing sends a row to the same shard."""
    rows = np.array(ids, np.int64)
    assert hash_ids(rows).tolist() == [mix64_of_one(i % 2**64) for i in ids]
    assert shards_of(rows, num_shards).tolist() == [shard_of(i, num_shards) for i in ids]


def test_the_hash_never_changes_between_releases() -> None:
    """The shard of a row depends on it. The numbers are those of SplitMix64 with seed 0."""
    assert mix64_of_one(0) == 0xE220A8397B1DCDAF
    assert mix64(np.array([0x9E3779B97F4A7C15], np.uint64)).tolist() == [0x6E789E6AA1B965F4]


def test_adjacent_ids_are_spread_evenly_over_shards() -> None:
    """Each of 64 shards gets 15 % more or fewer rows than the mean at most."""
    counts = np.bincount(shards_of(np.arange(64_000, dtype=np.int64), 64), minlength=64)
    assert counts.min() > 850
    assert counts.max() < 1150


STEPS = st.lists(st.tuples(st.sets(MIXED_IDS, max_size=40), st.booleans()), max_size=12)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_the_index_equals_a_dict(steps: list[tuple[set[int], bool]]) -> None:
    """The equality holds after any insertions and removals."""
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
        ids_of_both = sorted(ids | model.keys())
        found = index.find(np.array(ids_of_both, np.int64)).tolist()
        assert found == [model.get(i, -1) for i in ids_of_both]
        assert len(index) == len(model)


def test_rows_that_are_made_and_removed_take_bounded_memory() -> None:
    """Slots of removed rows are used again or removed."""
    index = RowIndex()
    for round_number in range(200):
        ids = np.arange(round_number * 100, round_number * 100 + 100, dtype=np.int64)
        index.insert(ids, np.arange(100))
        index.remove(index.find(ids))
    assert len(index) == 0
    assert index.num_bytes < 8192


def test_a_tensor_that_cannot_grow_keeps_its_rows() -> None:
    """No machine has the requested memory."""
    growing = GrowingTensor(4, (2,), torch.float32)
    growing.tensor[:] = 7.0
    with pytest.raises(OSError, match="memory"):
        growing.grow(2**45)
    assert growing.tensor.tolist() == [[7.0, 7.0]] * 4
    growing.grow(8)
    assert growing.tensor.tolist() == [[7.0, 7.0]] * 4 + [[0.0, 0.0]] * 4


@pytest.mark.parametrize("short", ["values", "optimizer/sum"])
def test_rows_are_added_once_every_column_can_grow(
    monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    """No memory was left for one of the columns."""
    rows = RowStore(2, torch.float32, {"sum": StateColumn(is_per_element=True, fill=0.5)})
    rows.add(np.arange(FIRST_CAPACITY), torch.ones(FIRST_CAPACITY, 2), birth=1)
    columns = {"values": 0, "optimizer/sum": 3}
    grow, number = GrowingTensor.grow, 0

    def fail_once(column: GrowingTensor, capacity: int) -> None:
        nonlocal number
        number += 1
        if number == columns[short] + 1:
            raise OSError("Cannot allocate memory")
        grow(column, capacity)

    monkeypatch.setattr(GrowingTensor, "grow", fail_once)
    more = np.arange(FIRST_CAPACITY, 2 * FIRST_CAPACITY)
    with pytest.raises(OSError, match="memory"):
        rows.add(more, torch.ones(FIRST_CAPACITY, 2), birth=2)
    assert (rows.find(more) == -1).all()
    added = rows.add(more, torch.ones(FIRST_CAPACITY, 2), birth=2)
    assert rows.state("sum", added).tolist() == [[0.5, 0.5]] * FIRST_CAPACITY
