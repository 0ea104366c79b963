"""Checks for losses that are not finite: no step with such a loss is committed."""

import math

from torch import Tensor

from shoal.model.gradients import is_finite
from shoal.model.local_parts import local_part
from shoal.model.not_finite import loss_not_finite


def check_loss(loss: Tensor, step: int) -> None:
    """Raise NonFiniteGradient unless the loss is finite. `step`: number of committed steps."""
    if not is_finite(loss.detach()):
        raise loss_not_finite(step, seen=str(loss.detach()))


class PendingLosses:
    """Losses of a step on a GPU, checked together with its gradients: reading a loss before its
    backward pass would idle the GPU. Gradients may be finite although the loss is not
    (`cross_entropy` of ignored targets)."""

    def __init__(self) -> None:
        self.excess: Tensor | None = None
        """Tensor on the losses' device: 0 if all are finite, else NaN. None: no losses yet."""

    def begin(self) -> None:
        """Begin a step: drop the losses of the previous one."""
        self.excess = None

    def note(self, loss: Tensor) -> None:
        """Add a loss before its backward pass."""
        total = local_part(loss.detach()).sum()
        excess = total - total
        self.excess = excess if self.excess is None else self.excess + excess

    def are_finite(self) -> bool:
        """True if all losses are finite. Waits for the GPU, if there are any."""
        return self.excess is None or math.isfinite(self.excess.item())

    def check(self, step: int) -> None:
        """Raise what `check_loss` raises unless all losses are finite."""
        if not self.are_finite():
            raise loss_not_finite(step, seen="NaN or Inf")
