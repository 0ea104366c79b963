"""Results of coroutines that wait for nothing."""

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing, and return its result."""
    try:
        work.send(None)
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome
    raise AssertionError("it waits")
