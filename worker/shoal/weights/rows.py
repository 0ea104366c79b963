"""Rows of embedding tables in a version, and their changes since an earlier version."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal_client.weights.cut_parts import BIRTHS, IDS, TABLES, VALUES
from shoal_proto.errors import MalformedMessage


@dataclass(frozen=True, kw_only=True)
class RowChanges:
    """Rows that differ from an earlier version. Ids are sorted."""

    ids: Tensor
    values: Tensor
    removed: Tensor
    """Ids of rows that were evicted since the earlier version."""


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """Rows of one shard of a table, by position. A position without a row has birth 0."""

    ids: Tensor
    births: Tensor
    values: Tensor

    def rows_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.ids[positions], self.values[positions]

    @property
    def is_live(self) -> Tensor:
        return self.births > 0


class PublishedRows:
    """The rows of one table in a version. The tensors are views of the version's memory."""

    def __init__(self, shards: Mapping[int, Mapping[str, Tensor]]) -> None:
        """`shards`: the columns of each shard. Raises MalformedMessage if a column is missing."""
        self.shards: dict[int, ShardRows] = {}
        for index, columns in sorted(shards.items()):
            if set(columns) != {IDS, BIRTHS, VALUES}:
                raise MalformedMessage(
                    "a table's shard lacks a column", seen=", ".join(sorted(columns))
                )
            self.shards[index] = ShardRows(
                ids=columns[IDS], births=columns[BIRTHS], values=columns[VALUES]
            )

    def __len__(self) -> int:
        """Number of rows."""
        return sum(int(each.is_live.sum()) for each in self.shards.values())

    def all(self) -> RowChanges:
        """Copy all rows, as changes to an empty table."""
        return _merged([_changes(None, each) for each in self.shards.values()])

    def changes_since(self, earlier: "PublishedRows | None") -> RowChanges:
        """Copy the rows that are new since the earlier version, or whose values differ bit for bit.

        All rows if there is no earlier version, or if its table has other shards, another width or
        another dtype: the job was started over meanwhile.
        """
        if earlier is None:
            return self.all()
        if earlier._kind() != self._kind():
            changes, before = self.all(), earlier.all().ids
            return replace(changes, removed=before[~torch.isin(before, changes.ids)])
        return _merged([_changes(earlier.shards[i], each) for i, each in self.shards.items()])

    def _kind(self) -> dict[int, tuple[torch.Size, torch.dtype]]:
        return {i: (each.values.shape[1:], each.values.dtype) for i, each in self.shards.items()}


def tables_of(tensors: Mapping[str, Tensor]) -> dict[str, PublishedRows]:
    """Return the tables among a version's tensors, by name."""
    columns: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if name.startswith(TABLES):
            table, index, column = name.removeprefix(TABLES).rsplit("/", 2)
            columns.setdefault(table, {}).setdefault(int(index), {})[column] = tensor
    return {table: PublishedRows(shards) for table, shards in columns.items()}


def _changes(before: ShardRows | None, now: ShardRows) -> RowChanges:
    is_new = now.is_live
    was_live = torch.zeros(0, dtype=torch.bool) if before is None else before.is_live
    if before is not None:
        # Rows mostly keep their positions: only positions whose rows differ are compared by id.
        count = min(len(is_new), len(was_live))
        is_same = (before.ids[:count] == now.ids[:count]) & is_new[:count] & was_live[:count]
        is_same &= _equal_bits(before.values[:count], now.values[:count])
        is_new, was_live = is_new.clone(), was_live.clone()
        is_new[:count] &= ~is_same
        was_live[:count] &= ~is_same
    ids, values = now.rows_at(is_new.nonzero().view(-1))
    removed = ids.new_empty(0)
    if before is not None:
        old_ids, old_values = before.rows_at(was_live.nonzero().view(-1))
        order = old_ids.argsort()
        old_ids, old_values = old_ids[order], old_values[order]
        if len(old_ids):
            at = torch.searchsorted(old_ids, ids).clamp(max=len(old_ids) - 1)
            has_moved = (old_ids[at] == ids) & _equal_bits(old_values[at], values)
        else:
            has_moved = torch.zeros(len(ids), dtype=torch.bool)
        removed = old_ids[~torch.isin(old_ids, ids)]
        ids, values = ids[~has_moved], values[~has_moved]
    return RowChanges(ids=ids, values=values, removed=removed)


def _equal_bits(one: Tensor, other: Tensor) -> Tensor:
    if one.shape[1] == 0 or not len(one):
        return torch.ones(len(one), dtype=torch.bool)
    return (one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all(dim=1)


def _merged(parts: Sequence[RowChanges]) -> RowChanges:
    ids = torch.cat([each.ids for each in parts])
    order = ids.argsort()
    return RowChanges(
        ids=ids[order],
        values=torch.cat([each.values for each in parts])[order],
        removed=torch.cat([each.removed for each in parts]).sort().values,
    )
