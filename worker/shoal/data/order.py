"""The order in which the samples of a job are trained on.

The order is a function of the epoch, and the number of committed steps is the position in it. So
each sample counts once an epoch, however members change, except those that `drop_last` leaves out.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from shoal.data.permutation import KeyedPermutation
from shoal.randomness import mix
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index

CONTENT_FIELD = "dataset_content"
LARGEST_KEPT_ORDER = 1 << 20
"""Largest number of samples for which an array of all indices is kept."""
BLOCK = 8192


@dataclass(frozen=True)
class SamplePosition:
    """Position in a job's samples."""

    step: int = 0
    epoch: int = 0
    offset: int = 0
    """Position in the epoch's order."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Order of samples: pure, the same on every member. Raises InvalidSpec for values out of range,
    and if `drop_last` leaves out every sample."""

    num_samples: int
    global_batch_size: int
    num_epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    """Leave out the samples at an epoch's end that do not fill a batch."""
    origin: SamplePosition = SamplePosition()
    """First position with batches of this size."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size", "num_epochs", "seed"):
            text = "epochs" if name == "num_epochs" else name
            value = as_index(text, getattr(self, name))
            object.__setattr__(self, name, value)
            if name == "num_samples" and value < 1:
                raise InvalidSpec("the dataset has no samples", expected="at least one")
            if name != "seed" and value < 1:
                raise InvalidSpec(f"{text} is out of range", seen=str(value), expected="at least 1")
        if self.drop_last and self.num_samples < self.global_batch_size:
            raise InvalidSpec(
                "drop_last leaves out every sample",
                seen=f"{self.num_samples} samples, global_batch_size={self.global_batch_size}",
                expected="at least one whole batch in an epoch",
            )

    @cached_property
    def rule(self) -> int:
        """Number of the rule that makes an order.

        1: torch's permutation, or no shuffling. 2, for more than `LARGEST_KEPT_ORDER` samples: a
        keyed permutation. 3: shards.
        """
        return 2 if self.shuffle and self.num_samples > LARGEST_KEPT_ORDER else 1

    @property
    def name(self) -> str:
        """Name in checkpoints and proposals."""
        return str(self.rule)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch. The last batch may be smaller."""
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @cached_property
    def samples_per_epoch(self) -> int:
        """Number of samples of an epoch that are trained on, the first ones of its order."""
        return min(self.num_samples, self.steps_per_epoch * self.global_batch_size)

    @cached_property
    def num_steps(self) -> int:
        """Number of steps of the whole job."""
        whole_epochs = self.num_epochs - self.origin.epoch - 1
        if whole_epochs < 0:
            return self.origin.step
        return self.origin.step + self._first_steps + whole_epochs * self.steps_per_epoch

    @cached_property
    def _first_steps(self) -> int:
        num_left = max(self.num_samples - self.origin.offset, 0)
        whole, rest = divmod(num_left, self.global_batch_size)
        return whole if self.drop_last or not rest else whole + 1

    @cached_property
    def num_steps_more(self) -> int:
        """Number of steps by which step numbers lag behind those of a job with this batch size from
        its start. Below 0 if earlier batches were smaller."""
        return (self.origin.epoch + 1) * self.steps_per_epoch - self._first_steps - self.origin.step

    def epoch_and_batch_index(self, step: int) -> tuple[int, int]:
        """Return a step's epoch, and the index of its batch in that epoch. The last step of each
        epoch has index `steps_per_epoch - 1`."""
        return divmod(step + self.num_steps_more, self.steps_per_epoch)

    def position(self, step: int) -> SamplePosition:
        """Return the position at which the step begins. Raises InvalidSpec for a step before the
        origin."""
        since = step - self.origin.step
        if since < 0:
            raise InvalidSpec(
                "a step from before the batch size was changed",
                seen=f"step {step}",
                expected=f"step {self.origin.step} or later",
            )
        if since < self._first_steps:
            offset = self.origin.offset + since * self.global_batch_size
            return SamplePosition(step, self.origin.epoch, offset)
        further, batch = divmod(since - self._first_steps, self.steps_per_epoch)
        return SamplePosition(step, self.origin.epoch + 1 + further, batch * self.global_batch_size)

    def span(self, step: int) -> tuple[int, int, int]:
        """Return (epoch, start, stop) of the step's global batch. Raises what `position` raises."""
        begins = self.position(step)
        stop = min(begins.offset + self.global_batch_size, self.num_samples)
        return begins.epoch, begins.offset, stop

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the indices of the samples at [start, stop) of an epoch's order."""
        if not self.shuffle:
            return torch.arange(start, stop)
        if self.rule == 1:
            # `narrow` takes a quarter of the time of a slice.
            order = _permutation(self.num_samples, self.seed, epoch)
            return order.narrow(0, start, stop - start)
        key = mix(self.seed, epoch)
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        parts = [_block(self.num_samples, key, block) for block in blocks]
        first = blocks.start * BLOCK
        return torch.cat(parts)[start - first : stop - first] if parts else torch.arange(0)


@lru_cache(maxsize=8)
def _permutation(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return an epoch's permutation, cached: batches of the next epoch are loaded ahead."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


@lru_cache(maxsize=16)
def _block(num_samples: int, seed: int, number: int) -> Tensor:
    start = number * BLOCK
    positions = torch.arange(start, min(start + BLOCK, num_samples))
    return KeyedPermutation(num_samples, seed)(positions)


def range_of_rank(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's share of [start, stop); shares differ in size by at most one."""
    each, extra = divmod(stop - start, world_size)
    own_start = start + rank * each + min(rank, extra)
    return own_start, own_start + each + (1 if rank < extra else 0)
