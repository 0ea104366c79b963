"""Loads the samples of one batch, wherever that is done: in a DataLoader's process or in the
trainer's own.

What a dataset draws at random for a sample (augmentation) follows from seed, epoch and the sample's
index: it does not depend on who loads it, on how many members there are, or on whether it is loaded
once more.
"""

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from shoal.data.parts import PerColumn, told_apart
from shoal.randomness import mix
from shoal_proto.errors import LoadingFailed, SampleFailed

Collate = Callable[[list[Any]], Any]

_LARGEST_TRACE = 20_000
_OF_THE_BATCH = 1 << 62
"""In the place of an index: no dataset has as many samples."""


class MapDataset(Protocol):
    """Any map-style dataset of torch."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class FailedSample:
    """What is told of a sample that could not be loaded."""

    index: int | None
    """None: the samples are there, and could not be made a batch of."""
    error: str
    trace: str
    may_pass: bool
    """Whether it may be loaded another time: storage or memory failed, not the dataset's code."""

    def raised(self) -> SampleFailed | LoadingFailed:
        """For the trainer."""
        where = "the samples of a batch" if self.index is None else f"sample {self.index}"
        done = "collated" if self.index is None else "loaded"
        kind = LoadingFailed if self.may_pass else SampleFailed
        failed = kind(
            f"{where} could not be {done}",
            seen=self.error,
            fix="The traceback is of the dataset's own code.",
            details={} if self.index is None else {"index": str(self.index)},
        )
        failed.add_note(self.trace)
        return failed


class Samples:
    """A dataset's samples by index, drawn from and collated."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, seeded: bool = True) -> None:
        """`seeded`: start the generators anew for each sample. Else a dataset that gives several
        samples at once (`__getitems__`) is asked for all of a batch together."""
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._seeded = seeded

    def batch(self, epoch: int, indices: Sequence[int], go_on: Callable[[], bool]) -> Any:
        """The collated samples; None once `go_on` answers that nobody wants them any more.

        Never raises: what fails is a FailedSample, which can be sent from one process to another.
        """
        index: int | None = None
        try:
            if not self._seeded and hasattr(self.dataset, "__getitems__"):
                items = self.dataset.__getitems__(list(indices))
                return self._collated(items, epoch, indices)
            items = []
            for index in indices:
                if not go_on():
                    return None
                self._draw_for(epoch, index)
                items.append(self.dataset[index])
            index = None
            self._draw_for(epoch, _OF_THE_BATCH + indices[0])
            return self._collated(items, epoch, indices)
        except Exception as error:  # noqa: BLE001 - raised by `FailedSample.raised`
            text = f"{type(error).__name__}: {error}"[:500]
            trace = "".join(traceback.format_exception(error))[-_LARGEST_TRACE:]
            return FailedSample(index, text, trace, isinstance(error, OSError | MemoryError))

    def _collated(self, items: list[Any], epoch: int, indices: Sequence[int]) -> Any:
        together = self._collate(items)
        if self._collate is not default_collate:
            return told_apart(together, len(items), lambda: self._alone(epoch, indices[0]))
        # Torch's makes a list of tuples, and of lists: with what each part is of all samples.
        if type(together) is list and isinstance(items[0], tuple):
            return tuple(together)
        return PerColumn(together) if type(together) is list else together

    def _alone(self, epoch: int, index: int) -> Any:
        """A batch of one sample, loaded anew: a collate function may have changed what it got."""
        self._draw_for(epoch, index)
        return self._collate([self.dataset[index]])

    def _draw_for(self, epoch: int, index: int) -> None:
        if self._seeded:
            _seed_generators(mix(self._seed, epoch, index))


def _seed_generators(number: int) -> None:
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(number & 0xFFFFFFFF)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Within, samples are loaded by the trainer's own process; its generators are behind it as
    they were."""
    numpy_random: Any = sys.modules.get("numpy.random")
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy_state is not None:
            numpy_random.set_state(numpy_state)
