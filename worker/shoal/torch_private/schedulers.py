"""Of torch's learning rate schedulers: which step they are at, and what they are made of."""

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, SequentialLR


def is_being_made(scheduler: Any) -> bool:
    """Whether its constructor is at work; torch 2.6 to 2.15."""
    made: Any = getattr(scheduler, "_is_initial", None)
    if made is not None:
        return bool(made)
    # Before that mark: their first step is the constructor's.
    return getattr(scheduler, "_step_count", 1) == 0


def milestones_of(scheduler: SequentialLR) -> Sequence[int]:
    """The steps at which the next of its schedulers begins."""
    return scheduler._milestones


def schedulers_in(scheduler: SequentialLR) -> Sequence[LRScheduler]:
    """Those that it has step one after the other."""
    return scheduler._schedulers


def mark_stepped(optimizer: Any) -> None:
    """Have schedulers take the optimizer for one that has stepped: they warn of others."""
    optimizer._opt_called = True
