"""Order of samples that lie in shards, in which each member reads few shards.

An epoch concatenates the shards in an order of its own, and cuts the result, the line, into
`columns` x `turns` streams of the same length. The j-th part of a batch comes from the j-th column,
and batches take turns: with 4 columns and 2 turns,

    batch 0:  0  1  2  3      batch 1:  4  5  6  7      batch 2:  0  1  2  3   ...

where each number is a stream, which gives its next samples. So a member that has the first half of
each batch reads half of the streams, and a process that loads every second batch half of those. The
sample at a position depends on nothing but the position, whoever reads it. The rest at the end of
the line, less than a batch, is the last batch.

The line is shuffled beforehand, in windows of `window` samples.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from shoal.data.order import Order
from shoal.data.shards import Shards
from shoal.randomness import mix

_SHARDS_OF_EPOCH = 1 << 62
"""Used instead of a window's number: no data set has as many."""


@dataclass(frozen=True, kw_only=True)
class ShardOrder(Order):
    """Order over shards; pure, as every order. Unshuffled, samples follow one after the other."""

    lengths: tuple[int, ...]
    """Samples of each shard."""
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
        """`together`: members take each batch together. Else each takes whole batches of a range
        that follow one another, from one stream."""
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
        """Name with all options that decide the order. The batch size is one: batches of another
        size are cut from other streams."""
        return (
            f"{self.rule}: {self.columns} columns, {self.turns} turns, window {self.window},"
            f" batches of {self.global_batch_size}"
        )

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop)
        if not self.shuffle:
            return positions
        key = mix(self.seed, epoch)
        places = self._shuffled(self._in_line(positions), key)
        shards = _permutation(len(self.lengths), mix(key, _SHARDS_OF_EPOCH))
        ends = self._lengths[shards].cumsum(0)
        which = torch.bucketize(places, ends, right=True)
        # From the place in the line to the index among the shards as they were given.
        return places + (self._ends[shards] - ends)[which]

    def _in_line(self, positions: Tensor) -> Tensor:
        """Return positions in the line of the samples at these positions of the epoch."""
        size = self.global_batch_size
        each, extra = divmod(size, self.columns)
        sizes = each + (torch.arange(self.columns) < extra).long()
        starts = sizes.cumsum(0) - sizes
        num_whole = self.num_samples // size
        num_batches = (num_whole - torch.arange(self.turns) + self.turns - 1) // self.turns
        batch, place = positions // size, positions % size
        turn, visit = batch % self.turns, batch // self.turns
        column = torch.bucketize(place, starts + sizes, right=True)
        stream = (num_batches.cumsum(0) - num_batches)[turn] * size
        stream = stream + num_batches[turn] * starts[column]
        found = stream + visit * sizes[column] + place - starts[column]
        return torch.where(batch < num_whole, found, positions)

    def _shuffled(self, places: Tensor, key: int) -> Tensor:
        """The places that these change with, each within its window."""
        windows = places // self.window
        shuffled = torch.empty_like(places)
        for window in sorted(set(windows.tolist())):
            first = window * self.window
            size = min(self.window, self.num_samples - first)
            among = windows == window
            permuted = _permutation(size, mix(key, window))
            shuffled[among] = first + permuted[places[among] - first]
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
