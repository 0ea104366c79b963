"""Rows that have changed between two versions of a table, compared with a comparison by id."""

import random

import pytest
import torch

from shoal.weights.rows import PublishedRows, tables_of
from shoal_proto.errors import MalformedMessage


def table(rows: dict[int, tuple[float, float]], order: list[int], capacity: int) -> PublishedRows:
    """Return a shard with these ids at positions in this order; -1: an empty position."""
    columns = {
        "ids": torch.zeros(capacity, dtype=torch.int64),
        "births": torch.zeros(capacity, dtype=torch.int64),
        "values": torch.zeros(capacity, 2),
    }
    for position, each in enumerate(order):
        if each >= 0:
            columns["ids"][position], columns["births"][position] = each, 1
            columns["values"][position] = torch.tensor(rows[each])
    return PublishedRows({0: columns})


@pytest.mark.parametrize("seed", range(30))
def test_changes_are_the_rows_that_differ_wherever_they_lie(seed: int) -> None:
    chance = random.Random(seed)
    before = {i: (chance.random(), 0.0) for i in chance.sample(range(20), 8)}
    after = {i: v for i, v in before.items() if chance.random() < 0.7}
    after |= {i: (chance.random(), 1.0) for i in chance.sample(range(20), 5)}
    old_order, new_order = list(before), list(after)
    if seed % 2:
        chance.shuffle(new_order)
    old_order.insert(2, -1)
    old, new = table(before, old_order, 24), table(after, new_order, 16 + seed % 3 * 8)
    changes = new.changes_since(old)
    bits = {i: torch.tensor(v).tolist() for i, v in after.items() if before.get(i) != v}
    assert dict(zip(changes.ids.tolist(), changes.values.tolist(), strict=True)) == bits
    assert changes.ids.tolist() == sorted(bits)
    assert changes.removed.tolist() == sorted(before.keys() - after.keys())
    assert len(new) == len(after) == len(new.all().ids) == len(new.changes_since(None).ids)


def test_rows_are_compared_by_their_bits() -> None:
    rows = {3: (float("nan"), -0.0)}
    assert not len(table(rows, [3], 8).changes_since(table(rows, [-1, 3], 8)).ids)
    assert len(table({3: (float("nan"), 0.0)}, [3], 8).changes_since(table(rows, [3], 8)).ids) == 1


def of_kind(
    ids: list[int], num_shards: int, width: int, dtype: torch.dtype = torch.float32
) -> PublishedRows:
    """A table of ones with these ids, each in the shard of its remainder."""
    return PublishedRows(
        {
            shard: {
                "ids": torch.tensor(own, dtype=torch.int64),
                "births": torch.ones(len(own), dtype=torch.int64),
                "values": torch.ones(len(own), width, dtype=dtype),
            }
            for shard in range(num_shards)
            for own in [[each for each in ids if each % num_shards == shard]]
        }
    )


@pytest.mark.parametrize(
    "after",
    [
        of_kind([2, 5], 2, 4),
        of_kind([2, 5], 1, 2),
        of_kind([2, 5], 1, 4, torch.float16),
    ],
    ids=["shards", "width", "dtype"],
)
def test_all_rows_are_replaced_if_a_job_was_started_over_with_another_table(
    after: PublishedRows,
) -> None:
    changes = after.changes_since(of_kind([1, 2, 3], 1, 4))
    assert changes.ids.tolist() == [2, 5]
    assert changes.removed.tolist() == [1, 3]
    assert changes.values.dtype == after.all().values.dtype


def test_a_shard_without_one_of_its_columns_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="column"):
        tables_of({"shoal.tables/users/00000/ids": torch.zeros(1, dtype=torch.int64)})
