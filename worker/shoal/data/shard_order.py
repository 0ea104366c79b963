"""Order of the samples of a data set in shards, in which each member reads few shards.

In each epoch the shards are concatenated in a new order. The result, the *line*, is shuffled in
windows of `window` samples, and cut into `columns` x `turns` streams. A batch has `columns` parts,
each from a different stream, and `turns` batches in a row use different streams. With 4 columns and
2 turns,

    batch 0:  0  1  2  3      batch 1:  4  5  6  7      batch 2:  0  1  2  3   ...

where each number is a stream, from which the next samples are taken. So a member with the first
half of each batch reads half of the streams, and each of its two loading processes a quarter.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from shoal.data.order import Order
from shoal.data.shards import Shards
from shoal.randomness import mix

_SHARDS_OF_EPOCH = 1 << 62
"""Seeds the order of shards, in place of a window's number."""


@dataclass(frozen=True, kw_only=True)
class ShardOrder(Order):
    """Order of samples in shards. Pure. Without shuffling, the order of the shards."""

    lengths: tuple[int, ...]
    columns: int
    turns: int
    window: int

    @classmethod
    def of(
        cls,
        shards: Shards,
        *,
        global_batch_size: int,
        num_epochs: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        together: bool,
    ) -> "ShardOrder":
        """`together`: True if members share each batch. If False, the line is one stream."""
        return cls(
            num_samples=len(shards),
            global_batch_size=global_batch_size,
            num_epochs=num_epochs,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            lengths=tuple(shards.lengths),
            columns=shards.columns if together else 1,
            turns=shards.turns if together else 1,
            window=shards.shuffle_buffer,
        )

    @cached_property
    def rule(self) -> int:
        return 3

    @property
    def name(self) -> str:
        """Name with the options that decide the order, the batch size among them."""
        return (
            f"{self.rule}: {self.columns} columns, {self.turns} turns, window {self.window},"
            f" batches of {self.global_batch_size}"
        )

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop)
        if not self.shuffle:
            return positions
        key = mix(self.seed, epoch)
        shuffled = self._shuffled(self._in_line(positions), key)
        shards = _permutation(len(self.lengths), mix(key, _SHARDS_OF_EPOCH))
        ends = self._lengths[shards].cumsum(0)
        shard_numbers = torch.bucketize(shuffled, ends, right=True)
        # Convert positions in the line to the shards' given order.
        return shuffled + (self._ends[shards] - ends)[shard_numbers]

    def _in_line(self, positions: Tensor) -> Tensor:
        size = self.global_batch_size
        each, extra = divmod(size, self.columns)
        sizes = each + (torch.arange(self.columns) < extra).long()
        starts = sizes.cumsum(0) - sizes
        num_whole = self.num_samples // size
        num_batches = (num_whole - torch.arange(self.turns) + self.turns - 1) // self.turns
        batch, offset = positions // size, positions % size
        turn, visit = batch % self.turns, batch // self.turns
        column = torch.bucketize(offset, starts + sizes, right=True)
        stream = (num_batches.cumsum(0) - num_batches)[turn] * size
        stream = stream + num_batches[turn] * starts[column]
        in_stream = stream + visit * sizes[column] + offset - starts[column]
        return torch.where(batch < num_whole, in_stream, positions)

    def _shuffled(self, positions: Tensor, key: int) -> Tensor:
        windows = positions // self.window
        shuffled = torch.empty_like(positions)
        for window in sorted(set(windows.tolist())):
            first = window * self.window
            size = min(self.window, self.num_samples - first)
            among = windows == window
            permuted = _permutation(size, mix(key, window))
            shuffled[among] = first + permuted[positions[among] - first]
        return shuffled

    @cached_property
    def _lengths(self) -> Tensor:
        return torch.tensor(self.lengths)

    @cached_property
    def _ends(self) -> Tensor:
        return self._lengths.cumsum(0)


@lru_cache(maxsize=256)
def _permutation(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
