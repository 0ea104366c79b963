"""Updates of one of several optimizers within a step, which are taken back with it."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.model.local_parts import local_part


class EarlyUpdates:
    """Those of the step under way: what they change is kept as it was before the first of them."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        """By identity: what is held, and what was in it."""
        self._states: dict[Optimizer, dict[Tensor, dict[str, Any]]] = {}
        self._state_tensors: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def keep(self, optimizers: Iterable[Optimizer], held: Iterable[Tensor]) -> None:
        """The optimizers are about to step, which changes the tensors that are held."""
        for optimizer in optimizers:
            if optimizer not in self._states:
                self._states[optimizer] = {
                    parameter: dict(state) for parameter, state in optimizer.state.items()
                }
                for state in self._states[optimizer].values():
                    for value in state.values():
                        if isinstance(value, Tensor):
                            self._state_tensors[id(value)] = (value, value.clone())
        for tensor in held:
            if id(tensor) not in self._tensors:
                own = local_part(tensor)
                self._tensors[id(tensor)] = (own, own.clone())

    @torch.no_grad()
    def restore(self) -> None:
        """The step does not happen."""
        for own, before in (*self._tensors.values(), *self._state_tensors.values()):
            own.copy_(before)
        for optimizer, states in self._states.items():
            optimizer.state.clear()
            optimizer.state.update(states)
        self.forget()

    @property
    def of_state(self) -> Collection[int]:
        """The tensors that the optimizers had as state when they stepped, by identity."""
        return self._state_tensors.keys()

    def forget(self) -> None:
        """The step is committed, or begins."""
        self._tensors.clear()
        self._states.clear()
        self._state_tensors.clear()
