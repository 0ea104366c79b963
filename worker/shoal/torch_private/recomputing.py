"""Private parts of torch's activation checkpointing, as of torch 2.13."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed._composable import checkpoint_activation
from torch.utils import checkpoint

T = TypeVar("T")

_WATCHED = "_shoal_records_results"


@dataclass
class _Pass:
    """A pass of a checkpointed function that is in progress on this thread."""

    results: list[Any]
    """Results of `same_again` in the forward pass, in order."""
    recomputes: bool
    num_repeated: int = 0


_passes: ContextVar[tuple[_Pass, ...]] = ContextVar("shoal_checkpointed_passes", default=())


def same_again(make: Callable[[], T]) -> T:
    """Return `make()`; while torch recomputes a checkpointed function, return the result that the
    same call had in the forward pass.

    Autograd recomputes the last function first, perhaps on another thread, and each function
    perhaps only in part. So results belong to one call of a checkpointed function, and are found by
    their order in that call. `make` is also called in a recomputation that torch's checkpointing
    does not control, and for calls beyond those of the forward pass. Valid after
    `watch_checkpointing`.
    """
    passes = _passes.get()
    # A function within a recomputed one has a new call, which records results again.
    source = next((each for each in passes if each.recomputes), None)
    if source is not None and source.num_repeated < len(source.results):
        result: T = source.results[source.num_repeated]
        source.num_repeated += 1
    else:
        result = make()
    for each in passes:
        if not each.recomputes:
            each.results.append(result)
    return result


def is_recomputing() -> bool:
    """True while torch's checkpointing recomputes a function on this thread."""
    return any(each.recomputes for each in _passes.get())


def watch_checkpointing() -> None:
    """Make checkpointed functions record results for `same_again`. Only the first call has an
    effect."""
    torch_module: Any = checkpoint
    plain = torch_module._checkpoint_without_reentrant_generator
    if hasattr(plain, _WATCHED):
        return

    @functools.wraps(plain)
    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        results: list[Any] = []
        # The function runs while the generator is suspended.
        with _in_pass(results, recomputes=False):
            yield from plain(_recomputing(function, results), *args, **kwargs)

    plain_forward = torch_module.CheckpointFunction.forward

    @functools.wraps(plain_forward)
    def forward(ctx: Any, function: Any, *args: Any) -> Any:
        results: list[Any] = []
        with _in_pass(results, recomputes=False):
            outputs = plain_forward(ctx, function, *args)
        ctx.run_function = _recomputing(function, results)
        return outputs

    setattr(generator, _WATCHED, True)
    torch_module._checkpoint_without_reentrant_generator = generator
    # The composable API has a reference of its own.
    composable: Any = checkpoint_activation
    composable._checkpoint_without_reentrant_generator = generator
    torch_module.CheckpointFunction.forward = staticmethod(forward)


def _recomputing(function: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    def recompute(*args: Any, **kwargs: Any) -> Any:
        with _in_pass(results, recomputes=True):
            return function(*args, **kwargs)

    return recompute


@contextmanager
def _in_pass(results: list[Any], *, recomputes: bool) -> Iterator[None]:
    before = _passes.get()
    _passes.set((*before, _Pass(results, recomputes)))
    try:
        yield
    finally:
        _passes.set(before)
