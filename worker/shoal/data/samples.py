"""Loading of one batch's samples, in a process of the DataLoader or in the trainer.

A dataset's random numbers from the global generators follow from seed, epoch and sample, unless
`seed_samples` is False.
"""

import errno
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch.utils.data import default_collate

from shoal.data.parts import PerColumn, columns_marked
from shoal.randomness import mix
from shoal_proto.errors import LoadingFailed, SampleFailed

Collate = Callable[[list[Any]], Any]

_LARGEST_TRACE = 20_000
_COLLATION_OFFSET = 1 << 62
"""Added to an index to seed collation."""


REMEDY = (
    "Memory, shared memory (/dev/shm), processes or open files ran out: use fewer num_workers, a"
    " smaller prefetch_factor or smaller batches; or give the container a larger /dev/shm (docker"
    " run --shm-size, an emptyDir of medium Memory), more memory, or a higher `ulimit -n`."
)
_LACKING = frozenset(
    (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EDQUOT)
)
_TORCH_LACKS = (
    *("unable to allocate shared memory", "unable to mmap", "unable to open shared memory"),
    *("can't allocate memory", "Cannot allocate memory", "No space left on device"),
    *("Too many open files", "out of memory", "unable to resize file", "can't start new thread"),
)


def lacks_resources(error: BaseException) -> bool:
    """True if memory, shared memory, processes or descriptors ran out."""
    if isinstance(error, OSError):
        return error.errno in _LACKING
    is_named = isinstance(error, RuntimeError) and any(each in str(error) for each in _TORCH_LACKS)
    return is_named or isinstance(error, MemoryError)


class MapDataset(Protocol):
    """torch's map-style datasets."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class FailedSample:
    """Report of a sample that could not be loaded, or of a batch that could not be collated or
    sent."""

    index: int | None
    """Index of the sample; None: a whole batch failed."""
    error: str
    trace: str
    is_temporary: bool
    """True if a later attempt may succeed: an OSError, or a lack of resources."""
    fix: str = "The traceback is of the dataset's own code."
    is_unsent: bool = False
    """True if a loaded batch could not be sent to the trainer."""

    @classmethod
    def of(cls, error: BaseException, index: int | None, *, is_unsent: bool = False) -> Self:
        text = f"{type(error).__name__}: {error}"[:500]
        trace = "".join(traceback.format_exception(error))[-_LARGEST_TRACE:]
        lacks = lacks_resources(error)
        is_temporary = lacks or isinstance(error, OSError)
        fix = {"fix": REMEDY} if lacks or (is_unsent and is_temporary) else {}
        return cls(index, text, trace, is_temporary, is_unsent=is_unsent, **fix)

    def raised(self) -> SampleFailed | LoadingFailed:
        """Return the error that the trainer raises."""
        subject = "the samples of a batch" if self.index is None else f"sample {self.index}"
        done = "loaded and collated" if self.index is None else "loaded"
        if self.is_unsent:
            subject, done = "a batch that was loaded", "sent to the trainer"
        kind = LoadingFailed if self.is_temporary else SampleFailed
        failed = kind(
            f"{subject} could not be {done}",
            seen=self.error,
            fix=self.fix,
            details={} if self.index is None else {"index": str(self.index)},
        )
        failed.add_note(self.trace)
        return failed


class Samples:
    """Loads samples by index, with seeded random numbers, and collates them."""

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, seeded: bool = True) -> None:
        """`seeded`: seed the generators for each sample. If False, a dataset with `__getitems__`
        loads a whole batch at once."""
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._seeded = seeded

    def batch(self, epoch: int, indices: Sequence[int], go_on: Callable[[], bool]) -> Any:
        """Return the collated samples; None if `go_on` returned False. Returns a FailedSample
        instead of raising, to send it between processes."""
        index: int | None = None
        try:
            if not self._seeded and hasattr(self.dataset, "__getitems__"):
                if not go_on():
                    return None
                items = self.dataset.__getitems__(list(indices))
                return self._collated(items, epoch, indices)
            items = []
            for index in indices:
                if not go_on():
                    return None
                self._draw_for(epoch, index)
                items.append(self.dataset[index])
            index = None
            self._draw_for(epoch, _COLLATION_OFFSET + indices[0])
            return self._collated(items, epoch, indices)
        except Exception as error:  # noqa: BLE001 - raised by `FailedSample.raised`
            return FailedSample.of(error, index)

    def _collated(self, items: list[Any], epoch: int, indices: Sequence[int]) -> Any:
        collated = self._collate(items)
        if self._collate is not default_collate:
            return columns_marked(collated, len(items), lambda: self._alone(epoch, indices[0]))
        # torch's default_collate makes a list of columns of tuples and lists.
        if type(collated) is list and isinstance(items[0], tuple):
            return tuple(collated)
        return PerColumn(collated) if type(collated) is list else collated

    def _alone(self, epoch: int, index: int) -> Any:
        """Load and collate one sample again, as collating may have changed it."""
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
def preserve_generators() -> Iterator[None]:
    """Restore the random generators at the end of the context."""
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
