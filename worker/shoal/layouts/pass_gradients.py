"""Completion of a rank's own gradients to those of the whole batch, after each backward pass, so
that a script may read them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Complete = Callable[[], None]
"""Reduces this rank's own gradients to those of the whole batch. Collective."""


class PassGradients:
    """State of a step's gradients: complete, or still this rank's own."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """`parameters`: those to which a pass adds this rank's own gradients only."""
        self._parameters = list(parameters)
        self.begin()

    def begin(self) -> None:
        """Begin a step, without gradients."""
        self._are_own = True
        self._kept: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def of_pass(self, complete: Complete, *, completes: bool) -> Iterator[None]:
        """Return a context for one pass. `completes`: complete the gradients at its end."""
        if not self._are_own and not self._kept:
            self._set_aside()
        self._are_own = True
        yield
        if completes:
            self.finish(complete)

    def finish(self, complete: Complete) -> None:
        """Complete the gradients. Collective, unless they are complete already."""
        if self._are_own:
            self._are_own = False
            complete()
        kept, self._kept = self._kept, {}
        with torch.no_grad():
            for parameter, before in kept.items():
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _set_aside(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._kept[parameter], parameter.grad = parameter.grad, None
