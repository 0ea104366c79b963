"""Loading of the samples of one batch, in a DataLoader's process or in the trainer's own.

Random draws of a dataset for a sample (augmentation) follow from seed, epoch and the sample's
index. They do not depend on the process that loads it, on the number of members, or on whether it
is loaded once more.
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

from shoal.data.parts import PerColumn, told_apart
from shoal.randomness import mix
from shoal_proto.errors import LoadingFailed, SampleFailed

Collate = Callable[[list[Any]], Any]

_LARGEST_TRACE = 20_000
_OF_THE_BATCH = 1 << 62
"""Used instead of an index: no dataset has as many samples."""


REMEDY = (
    "Memory, shared memory (/dev/shm), processes or open files ran out: take fewer num_workers, a"
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
"""Messages of the RuntimeErrors by which torch and Python report that a resource ran out."""


def lacks_resources(error: BaseException) -> bool:
    """True if memory, shared memory, processes or descriptors ran out."""
    if isinstance(error, OSError):
        return error.errno in _LACKING
    told = isinstance(error, RuntimeError) and any(each in str(error) for each in _TORCH_LACKS)
    return told or isinstance(error, MemoryError)


class MapDataset(Protocol):
    """Any map-style dataset of torch."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class FailedSample:
    """Report of a sample that could not be loaded."""

    index: int | None
    """None: the samples were loaded, but not collated into a batch."""
    error: str
    trace: str
    may_pass: bool
    """True if a later attempt may succeed: storage or memory failed, not the dataset's code."""
    fix: str = "The traceback is of the dataset's own code."
    is_unsent: bool = False
    """The batch was loaded, and could not be sent to the trainer."""

    @classmethod
    def of(cls, error: BaseException, index: int | None, *, is_unsent: bool = False) -> Self:
        text = f"{type(error).__name__}: {error}"[:500]
        trace = "".join(traceback.format_exception(error))[-_LARGEST_TRACE:]
        lacks = lacks_resources(error)
        may_pass = lacks or isinstance(error, OSError)
        fix = {"fix": REMEDY} if lacks or (is_unsent and may_pass) else {}
        return cls(index, text, trace, may_pass, is_unsent=is_unsent, **fix)

    def raised(self) -> SampleFailed | LoadingFailed:
        """Return the error to raise in the trainer."""
        where = "the samples of a batch" if self.index is None else f"sample {self.index}"
        done = "collated" if self.index is None else "loaded"
        if self.is_unsent:
            where, done = "a batch that was loaded", "sent to the trainer"
        kind = LoadingFailed if self.may_pass else SampleFailed
        failed = kind(
            f"{where} could not be {done}",
            seen=self.error,
            fix=self.fix,
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
            return FailedSample.of(error, index)

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
    """Restore the generators of the trainer's process after the block, in which it loads samples
    itself."""
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
