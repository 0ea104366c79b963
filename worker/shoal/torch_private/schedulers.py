"""Of torch's learning rate schedulers: whether one is being made, which steps it."""

from typing import Any


def is_being_made(scheduler: Any) -> bool:
    """Whether its constructor is at work; torch 2.6 to 2.15."""
    made: Any = getattr(scheduler, "_is_initial", None)
    if made is not None:
        return bool(made)
    # Before that mark: their first step is the constructor's.
    return getattr(scheduler, "_step_count", 1) == 0
