"""Private parts of torch's learning rate schedulers: their progress and their parts."""

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, SequentialLR


def is_in_constructor(scheduler: Any) -> bool:
    """True while the scheduler's constructor runs, which makes the first step."""
    # torch 2.6 to 2.15 set this mark.
    mark: Any = getattr(scheduler, "_is_initial", None)
    if mark is not None:
        return bool(mark)
    # Releases without that mark: the first step is the constructor's.
    return getattr(scheduler, "_step_count", 1) == 0


def milestones_of(scheduler: SequentialLR) -> Sequence[int]:
    """Return the steps at which the scheduler continues with its next scheduler."""
    return scheduler._milestones


def schedulers_in(scheduler: SequentialLR) -> Sequence[LRScheduler]:
    """Return the schedulers that this one steps in sequence."""
    return scheduler._schedulers


def mark_stepped(optimizer: Any) -> None:
    """Mark the optimizer as stepped: otherwise its schedulers warn that it was not."""
    optimizer._opt_called = True
