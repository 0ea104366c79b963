"""The step that is open on this thread.

A new thread, such as autograd's for backward passes on a GPU, has no step. So a module stores in
its forward pass the values that its backward pass needs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PresentSamples:
    """Samples of the global batch that this thread computes on."""

    seed: int
    step: int
    first: int
    """Position of the first sample in the global batch; the others follow."""
    count: int


@dataclass(frozen=True)
class BatchNormMembers:
    """Members whose samples BatchNorm normalises together."""

    group: dist.ProcessGroup
    has_samples: bool
    """False if this member computes with a stand-in sample."""


class PartsOfStep(Protocol):
    """The interface of a step that cuts its batch into parts."""

    def parts(self, batch: Any, num_parts: int) -> Iterator[Any]:
        """See `Batch.parts`."""


class InputSizes(Protocol):
    """An observer of the sizes of BatchNorm layers' inputs."""

    def check_norm_input(self, size: Sequence[int]) -> None:
        """Note the size of an input that a layer is about to normalise."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The open step. Outside of a step every field but `committing` is None."""

    samples: PresentSamples | None = None
    """None without `Session.batches`, or under asynchronous strategies."""
    batchnorm: BatchNormMembers | None = None
    """None: each member normalises its own samples."""
    check_gather: Callable[[Sequence[Tensor], Tensor], None] | None = None
    """Called with (outputs, tensor) before the script gathers on torch's default group.

    None: there is nothing to check.
    """
    sizes: InputSizes | None = None
    parts: PartsOfStep | None = None
    guard: object | None = None
    """`StepGuard` of the session whose step is open."""
    committing: object | None = None
    """`StepGuard` of the session that is stepping its optimizers."""


NO_STEP = StepContext()
_context: ContextVar[StepContext] = ContextVar("shoal_step_context", default=NO_STEP)


def current() -> StepContext:
    """Return the context of the open step; NO_STEP if none is."""
    return _context.get()


def set_current(context: StepContext) -> None:
    """Replace this thread's context."""
    _context.set(context)
