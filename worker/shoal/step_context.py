"""The step that is open on this thread, for code that torch or the script calls without it.

Random numbers, normalisation, and the checks on calls of torch's own read it; `Session.step` sets
it. Members may be threads of one process, and each has its own.

A thread that starts has no step: neither a thread of the script's, nor one on which autograd runs a
backward pass on a GPU. What a module needs there it keeps from its forward pass, as keyed dropout
and synchronised BatchNorm do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PresentSamples:
    """The samples of the global batch that are computed on."""

    seed: int
    step: int
    first: int
    """Position in the global batch of the first of them; the others follow it."""
    count: int


@dataclass(frozen=True)
class BatchNormMembers:
    """The members whose samples BatchNorm normalises together."""

    group: dist.ProcessGroup
    has_samples: bool
    """False if this member computes with a sample that does not count, as it has no share."""


class PartsOfStep(Protocol):
    """A step, as far as its batch can be cut into parts."""

    def parts(self, batch: Any, num_parts: int) -> Iterator[Any]:
        """See `Batch.parts`."""


class InputSizes(Protocol):
    """A reader of the sizes that BatchNorm layers get."""

    def look_at_sizes(self, size: Sequence[int]) -> None:
        """Look at the sizes of what a layer is about to normalise."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The open step; every field is None outside of one, but for `committing`."""

    samples: PresentSamples | None = None
    """None in a step whose batches the script takes from elsewhere."""
    batchnorm: BatchNormMembers | None = None
    """None: each member normalises its own samples."""
    check_gather: Callable[[Sequence[Tensor], Tensor], None] | None = None
    """Called with (outputs, tensor) before the script gathers on torch's default group; None where
    the members' shares are of one size."""
    sizes: InputSizes | None = None
    parts: PartsOfStep | None = None
    guard: object | None = None
    """The `StepGuard` of the session whose step is open."""
    committing: object | None = None
    """The `StepGuard` of the session that steps its optimizers at the moment."""


NO_STEP = StepContext()
_context: ContextVar[StepContext] = ContextVar("shoal_step_context", default=NO_STEP)


def current() -> StepContext:
    """The context of the step that is open on this thread; NO_STEP if none is."""
    return _context.get()


def set_current(context: StepContext) -> None:
    """Replace this thread's context until further notice."""
    _context.set(context)
