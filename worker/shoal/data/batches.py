"""Which samples a step trains on, and which of them are this member's.

The order of samples is a function of seed and epoch alone and the position in it is the committed
step, so who is there decides only who computes what: with any number of members, changing at any
time, each sample counts exactly once an epoch.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from shoal.data.parts import of_step
from shoal_proto.errors import InvalidSpec


class MapDataset(Protocol):
    """Any map-style dataset of torch."""

    def __getitem__(self, index: int, /) -> Any: ...


ORDER = 1
"""Number of the rule by which seed and epoch give an order; another rule has another number."""

Dataset = MapDataset | tuple[Tensor, ...]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One member's part of one step."""

    inputs: Any
    targets: Any
    """None if the dataset has one part only."""
    indices: list[int]
    """The dataset's indices of these samples; empty if this member has no part in the step. It
    then holds one sample all the same, which gets weight 0."""
    weight: float
    """The member's share of the global batch times the number of shares."""
    step: int
    """Optimizer steps before this one."""
    epoch: int
    first: int = 0
    """Position in the global batch of the first of these samples."""

    def parts(self, num_parts: int) -> Iterator["Batch"]:
        """This batch as so many micro-batches, on every member as many:

            with session.step():
                for part in batch.parts(4):
                    session.backward(loss_fn(model(part.inputs), part.targets))

        Each part's loss is the mean over its samples; the session weights it, so that gradients
        are those of the whole global batch. They are reduced once, in the last part. Parts differ
        by one sample at most; where a share has fewer samples than there are parts, some parts are
        empty: they hold one sample all the same, which gets weight 0.

        Raises InvalidSpec outside of a step, for fewer than one part or more than a global batch
        has samples, and where a part has no backward pass or more than one.
        """
        return of_step().parts(self, num_parts)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which samples are trained on. Pure: the same on every member."""

    num_samples: int
    global_batch_size: int
    num_epochs: int = 1
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch_size", "num_epochs"):
            if getattr(self, name) < 1:
                raise InvalidSpec(
                    f"{name} is out of range", seen=str(getattr(self, name)), expected="at least 1"
                )

    @property
    def steps_per_epoch(self) -> int:
        """The last one is smaller if the batch size does not divide."""
        return -(-self.num_samples // self.global_batch_size)

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.num_epochs

    def span(self, step: int) -> tuple[int, int, int]:
        """(epoch, start, stop): the positions of the step's global batch in its epoch's order."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch_size
        return epoch, start, min(start + self.global_batch_size, self.num_samples)

    def epoch_order(self, epoch: int) -> Tensor:
        """Sample index by position, for a whole epoch."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(_mix(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)


def share(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """The part of [start, stop) that is a rank's: contiguous, sizes differing by one at most."""
    each, extra = divmod(stop - start, world_size)
    own_start = start + rank * each + min(rank, extra)
    return own_start, own_start + each + (1 if rank < extra else 0)


class Loader:
    """Makes batches of a dataset in a given order."""

    def __init__(self, dataset: Dataset, order: Order, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._order = order
        self._collate: Collate = collate or default_collate
        self._columns = _columns(dataset)
        self._epoch = -1
        self._indices = torch.empty(0, dtype=torch.int64)

    def synchronous(self, step: int, index: int, count: int) -> Batch:
        """One of `count` shares of a step that all members take together."""
        epoch, start, stop = self._order.span(step)
        own_start, own_stop = share(start, stop, index, count)
        weight = (own_stop - own_start) * count / (stop - start)
        return self._batch(
            epoch, (own_start, own_stop), step=step, weight=weight, first=own_start - start
        )

    def leased(self, epoch: int, start: int, stop: int, step: int) -> Batch:
        """The positions [start, stop) of an epoch's order, all of them this member's."""
        return self._batch(epoch, (start, stop), step=step, weight=1.0)

    def _batch(
        self, epoch: int, span: tuple[int, int], *, step: int, weight: float, first: int = 0
    ) -> Batch:
        if epoch != self._epoch:
            self._indices, self._epoch = self._order.epoch_order(epoch), epoch
        start, stop = span
        indices = self._indices[start:stop]
        # A model need not cope with no samples: without a share it gets one of others, weight 0.
        inputs, targets = self._load(indices if stop > start else self._indices[:1])
        return Batch(
            inputs=inputs,
            targets=targets,
            indices=indices.tolist(),
            weight=weight,
            step=step,
            epoch=epoch,
            first=first,
        )

    def _load(self, indices: Tensor) -> tuple[Any, Any]:
        if self._columns is not None:
            return _split([column[indices] for column in self._columns])
        dataset: Any = self._dataset
        return _split(self._collate([dataset[index] for index in indices.tolist()]))


def dataset_size(dataset: Dataset) -> int:
    """Number of samples. Raises InvalidSpec for what has no length or no items by index."""
    columns = _columns(dataset)
    if columns is not None:
        return len(columns[0])
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        return len(dataset)
    raise InvalidSpec(
        "the dataset has no length, or no items by index",
        seen=type(dataset).__name__,
        expected="a map-style dataset, a TensorDataset or a tuple of tensors",
        fix="Give a DataLoader's dataset, not the DataLoader: session.batches makes the batches.",
    )


def describe(dataset: Dataset) -> str:
    """What members compare to see that they train on the same data."""
    columns = _columns(dataset)
    if columns is None:
        return f"{type(dataset).__name__} of {dataset_size(dataset)}"
    parts = [f"{str(c.dtype).removeprefix('torch.')}{tuple(c.shape)}" for c in columns]
    return f"tensors {' '.join(parts)}"


def _columns(dataset: Dataset) -> Sequence[Tensor] | None:
    """The dataset as whole tensors, if it is made of them: then a batch is one index operation."""
    columns: Any = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if not isinstance(columns, tuple) or not columns:
        return None
    if not all(isinstance(column, Tensor) for column in columns):
        return None
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise InvalidSpec(
            "the tensors of the dataset differ in length", seen=str(lengths), expected="one length"
        )
    return columns


def _split(parts: Any) -> tuple[Any, Any]:
    """(inputs, targets): the last part is the target, if there is more than one."""
    if not isinstance(parts, list | tuple):
        return parts, None
    if len(parts) == 1:
        return parts[0], None
    inputs = parts[0] if len(parts) == 2 else tuple(parts[:-1])
    return inputs, parts[-1]


def _mix(seed: int, epoch: int) -> int:
    """One seed of two numbers, such that neighbouring pairs have nothing in common (splitmix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch + 1) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & 0x7FFFFFFFFFFFFFFF
