"""Gradients that are those of the whole batch as soon as a backward pass is over.

Between its passes, and after the last one, a script may read gradients or change them: it clamps
them, or moves weights along them (sharpness-aware minimisation). It has to see the gradients that
one process sees, so a rank's own gradients, or summands of them, are reduced with the others'
before `session.backward` returns. Layouts that reduce in backward need none of this.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Complete = Callable[[], None]
"""Makes gradients, all of them this rank's own, those of the whole batch. Collective."""


class PassGradients:
    """Gradients that the passes of a step have added, complete or not."""

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
        """Surround a pass; `completes`: complete gradients after it, else later or by `finish`."""
        if not self._are_own and not self._kept:
            self._set_aside()
        self._are_own = True
        yield
        if completes:
            self.finish(complete)

    def finish(self, complete: Complete) -> None:
        """Complete what is not complete yet. Collective, unless everything is."""
        if self._are_own:
            self._are_own = False
            complete()
        kept, self._kept = self._kept, {}
        with torch.no_grad():
            for parameter, before in kept.items():
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _set_aside(self) -> None:
        """Set complete gradients aside, so that `complete` reduces only those of the next pass. The
        script may have changed them since."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._kept[parameter], parameter.grad = parameter.grad, None
