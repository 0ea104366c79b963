"""State by parameter, kept from one committed step to the next."""

from typing import Generic, TypeVar

import torch
from torch import Tensor

from shoal.compression.base import PackedTensors

Kept = TypeVar("Kept")


class StepValues(Generic[Kept]):
    """Values by parameter name, discarded unless their step is committed.

    Keyed by name: DDP packs parameters in another order after its first step.
    """

    def __init__(self) -> None:
        self._committed: dict[str, Kept | None] = {}
        self._pending: dict[str, Kept | None] = {}
        self._step = 0

    def begin(self, step: int) -> None:
        """Begin the next step; `step` steps are committed. If the number has risen, the values of
        the previous step count as committed, even if this member received the state of that step
        from another member: it took part in the exchange."""
        if self._step < step:
            self._committed |= self._pending
        self._pending = {}
        self._step = step

    def get(self, name: str) -> Kept | None:
        return self._pending[name] if name in self._pending else self._committed.get(name)

    def put(self, name: str, value: Kept | None) -> None:
        self._pending[name] = value

    def clear(self) -> None:
        self._committed, self._pending = {}, {}


class Residuals:
    """Error feedback: compression errors that are added to the next step's values.

    Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al., arXiv:1901.09847.
    """

    def __init__(self) -> None:
        self._carry: StepValues[Tensor] = StepValues()

    def begin(self, step: int) -> None:
        self._carry.begin(step)

    def compensate(self, packed: PackedTensors, length: int | None = None) -> Tensor:
        """Return the values plus residuals, in fp32, padded with zeros up to `length`."""
        size = packed.flat.numel()
        total = torch.empty(length or size, dtype=torch.float32, device=packed.flat.device)
        total[:size] = packed.flat
        total[size:] = 0
        for name, span in packed.slots():
            errors = self._carry.get(name)
            if errors is not None:
                total[span] += errors
        return total

    def keep(self, packed: PackedTensors, errors: Tensor) -> None:
        """Keep the errors of the values sent as the new residuals."""
        for name, span in packed.slots():
            self._carry.put(name, errors[span])

    def release(self, packed: PackedTensors) -> None:
        """Add the residuals to the values, and clear the residuals."""
        for name, span in packed.slots():
            errors = self._carry.get(name)
            if errors is not None:
                packed.flat[span] += errors
            self._carry.put(name, None)
