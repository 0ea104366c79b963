"""Inspection of an optimizer's state after each step: can it be sent to another member?"""

import json
from collections.abc import Callable

import torch.distributed as dist
from torch.optim import Optimizer

from shoal.backends.abortable.gather import barrier_after_collective, gather
from shoal.model.several import optimizers_of
from shoal.state.optimizer_state import InspectedObjects, contents_of, take_settings
from shoal_proto.errors import ShoalError, UnsupportedOptimizer


class StateInspection:
    """Inspection of one optimizer, step by step.

    Members that hold shards of one state raise a refusal together.
    """

    def __init__(self) -> None:
        self._state = InspectedObjects()
        self._settings = InspectedObjects()
        self.refusal: ShoalError | None = None
        """Refusal of the state after the latest step; None if it is accepted."""

    def inspect(self, optimizer: Optimizer, look: Callable[[], object]) -> None:
        """Inspect the state by `look`, which collects it; keep its error in `refusal`.

        Raises UnsupportedOptimizer at once for a setting of a group: all members raise it.
        """
        optimizers = optimizers_of(optimizer).values()
        groups = (group for each in optimizers for group in each.param_groups)
        settings = [v for group in groups for key, v in group.items() if key != "params"]
        if not self._settings.has(settings):
            take_settings(optimizer)
            self._settings.keep(settings)
        state = contents_of(optimizers)
        if not self._state.has(state):
            try:
                look()
            except UnsupportedOptimizer as error:
                self.refusal = error
                return
            self._state.keep(state)
        self.refusal = None

    def check(self, optimizer: Optimizer, look: Callable[[], object]) -> None:
        """Inspect, and raise the refusal at once: for members that all hold the same state."""
        self.inspect(optimizer, look)
        if self.refusal is not None:
            raise self.refusal

    def raise_on_all(self, group: dist.ProcessGroup) -> None:
        """Raise one member's refusal on all members, if there is one. Collective."""
        own = self.refusal.to_dict() if self.refusal is not None else None
        messages = gather(json.dumps(own).encode(), group)
        refusal = next((each for each in map(json.loads, messages) if each is not None), None)
        if refusal is not None:
            barrier_after_collective(group)
            raise ShoalError.from_dict(refusal)
