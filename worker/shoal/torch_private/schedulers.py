"""Private parts of torch's learning rate schedulers: their progress and their parts."""

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, SequentialLR


def is_being_made(scheduler: Any) -> bool:
    """True while the scheduler's constructor runs; torch 2.6 to 2.15."""
    mark: Any = getattr(scheduler, "_is_initial", None)
    if mark is not None:
        return bool(mark)
    # Releases without that mark: the first step is the constructor's.
    return getattr(scheduler, "_step_count", 1) == 0


def milestones_of(scheduler: SequentialLR) -> Sequence[int]:
    """Return the steps at which the scheduler moves on to its next one."""
    return scheduler._milestones


def schedulers_in(scheduler: SequentialLR) -> Sequence[LRScheduler]:
    """Return the schedulers that this one steps in sequence."""
    return scheduler._schedulers


def mark_stepped(optimizer: Any) -> None:
    """Mark the optimizer as stepped: schedulers warn if it has not."""
    optimizer._opt_called = True
