"""Evaluation that the members of a session share."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from shoal import randomness
from shoal.data.batch_options import own_collate
from shoal.data.batches import Batch, Dataset, Loader, dataset_size, describe
from shoal.data.content import content_of
from shoal.data.order import Order
from shoal.data.samples import Collate
from shoal.membership.generation import Generation
from shoal.session.shared_calls import HALVES, SharedCalls, reduce, values_by_name
from shoal.strategies.base import Strategy
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import as_index

Metrics = Mapping[str, float | int | Tensor]
Measure = Callable[[Batch], Metrics]
"""Returns sums over the samples of one batch, by name."""


class Evaluation:
    """Evaluation of one data set, in the data set's own order."""

    def __init__(
        self,
        data: Dataset | DataLoader[Any],
        measure: Measure,
        *,
        batch_size: int | None,
        collate: Collate | None,
    ) -> None:
        """`batch_size` is per member. A DataLoader gives its data set, and the default batch size
        and collate function. Raises InvalidSpec without a batch size, and for a DataLoader that
        leaves samples out or repeats some."""
        if isinstance(data, DataLoader):
            _check_takes_all(data)
            batch_size = data.batch_size if batch_size is None else batch_size
            collate = collate or own_collate(data)
            data = data.dataset
        assert not isinstance(data, DataLoader), "a data set"
        if batch_size is None:
            raise InvalidSpec("an evaluation without a batch size", expected="batch_size=...")
        self._data = data
        self._measure = measure
        self._batch_size = as_index("batch_size", batch_size)
        self._collate = collate
        self._num_samples = dataset_size(data)
        content = content_of(data)
        of = f"{describe(data)} (content {content})" if content else describe(data)
        self.name = f"session.evaluate of {of} by {self._batch_size}"

    def run(
        self,
        calls: SharedCalls,
        strategy: Strategy,
        pausing: Callable[[], AbstractContextManager[None]],
    ) -> dict[str, Any]:
        """Return the sums over all samples, the same on every member. If a member is lost
        meanwhile, the others begin again, with all samples divided among them."""

        def attempt(generation: Generation, group: dist.ProcessGroup) -> dict[str, Any]:
            index, count = strategy.data_share(generation)
            # Shares take different times: members wait for the slowest.
            with pausing(), randomness.preserved():
                sums = self._sums(index, count)
                strategy.finish_passes()
            return reduce(sums, "sum", group, generation, part=index)

        return calls.run(self.name, attempt)

    @torch.no_grad()
    def _sums(self, index: int, count: int) -> dict[str, float | int | Tensor]:
        order = Order(
            num_samples=self._num_samples,
            global_batch_size=self._batch_size * count,
            shuffle=False,
        )
        loader = Loader(self._data, order, self._collate)
        sums: dict[str, float | int | Tensor] = {}
        for step in range(order.num_steps):
            batch = loader.synchronous(step, index, count)
            # Measure even without samples: a forward pass may need all members.
            measured = {
                name: _wide(value) for name, value in values_by_name(self._measured(batch)).items()
            }
            if not batch.indices:
                measured = {name: _zero_like(value) for name, value in measured.items()}
            if sums and sums.keys() != measured.keys():
                raise InvalidSpec(
                    "an evaluation measures different values for different batches",
                    seen=", ".join(map(repr, measured)),
                    expected=", ".join(map(repr, sums)),
                )
            for name, each in measured.items() if sums else ():
                _check_shape(name, each, sums[name])
            sums = {name: sums[name] + each if sums else each for name, each in measured.items()}
        return sums

    def _measured(self, batch: Batch) -> Metrics:
        measured = self._measure(batch)
        if not isinstance(measured, Mapping):
            raise InvalidSpec(
                "an evaluation's measure returned no named values",
                seen=type(measured).__name__,
                expected='sums over the batch by name, as {"correct": number, "loss": tensor}',
            )
        return measured


def _check_takes_all(loader: DataLoader[Any]) -> None:
    """Raise InvalidSpec unless the loader takes each sample once, in any order."""
    sampler: Any = loader.sampler
    everything = range(dataset_size(loader.dataset))
    if type(sampler) is DistributedSampler:
        # All processes together take every sample, some of them twice.
        takes_all = not sampler.drop_last and dataset_size(sampler.dataset) == len(everything)
    elif loader.batch_size is None and loader.batch_sampler is not None:
        sampler = loader.batch_sampler
        with randomness.preserved():
            takes_all = _is_each_once(chain.from_iterable(sampler), everything)
    elif type(sampler) is SequentialSampler:
        takes_all = len(sampler) == len(everything)
    elif type(sampler) is RandomSampler and not sampler.replacement:
        takes_all = sampler.num_samples == len(sampler.data_source) == len(everything)
    else:
        with randomness.preserved():
            takes_all = _is_each_once(sampler, everything)
    if not takes_all:
        raise InvalidSpec(
            "an evaluation measures each sample once, and the DataLoader's sampler does not",
            seen=f"{type(sampler).__name__}, and {len(everything)} samples in the data set",
            expected="a sampler that takes every sample once, in any order",
            fix="Give the part to measure as a data set: Subset(dataset, indices) of torch.",
        )


def _is_each_once(taken: Iterable[int], everything: range) -> bool:
    # A sampler may be endless.
    return sorted(islice(taken, len(everything) + 1)) == [*everything]


def _check_shape(name: str, value: float | int | Tensor, before: float | int | Tensor) -> None:
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else () for v in (value, before)]
    if shapes[0] != shapes[1]:
        raise InvalidSpec(
            f"an evaluation measures {name!r} in different shapes for different batches",
            seen=f"{shapes[0]}, and {shapes[1]} for an earlier batch",
            expected="the sum over the batch's samples, in a shape that does not depend on"
            " their number",
        )


def _wide(value: float | int | Tensor) -> float | int | Tensor:
    """Half-precision types would soon lose the next batch's part of a sum."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def _zero_like(value: float | int | Tensor) -> float | int | Tensor:
    return torch.zeros_like(value) if isinstance(value, Tensor) else type(value)(0)
