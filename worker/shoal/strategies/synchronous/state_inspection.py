"""Inspection of an optimizer's state after each step: can it be sent to another member?"""

import json
from collections.abc import Callable

import torch.distributed as dist
from torch.optim import Optimizer

from shoal.backends.abortable.gather import barrier_after_collective, gather
from shoal.model.several import optimizers_of
from shoal.model.trained_parameters import are_same
from shoal.state.optimizer_state import take_settings
from shoal_proto.errors import ShoalError, UnsupportedOptimizer


class StateInspection:
    """Inspection of one optimizer, step by step.

    Members that hold shards of one state raise a refusal together: in the job's first step, before
    a checkpoint, with their votes on the next step, or at the end. If the state consists of the
    same objects as at the last inspection, as in nearly every step, it is not inspected again.
    """

    def __init__(self) -> None:
        self._state = _InspectedObjects()
        self._settings = _InspectedObjects()
        self.refusal: ShoalError | None = None
        """The error that refuses the state after the latest step; None if it is accepted."""

    def inspect(self, optimizer: Optimizer, look: Callable[[], object]) -> None:
        """Inspect the state by `look`, which collects it; keep its error in `refusal`.

        Raises UnsupportedOptimizer at once for a setting of a group: settings are the same on all
        members, so all of them raise it.
        """
        optimizers = optimizers_of(optimizer).values()
        groups = (group for each in optimizers for group in each.param_groups)
        settings = [v for group in groups for key, v in group.items() if key != "params"]
        if not self._settings.has(settings):
            take_settings(optimizer)
            self._settings.keep(settings)
        state: list[object] = []
        for each in optimizers:
            for owner, kept in each.state.items():
                state.append(owner)
                state += kept.values()
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


class _InspectedObjects:
    """Objects that were inspected."""

    def __init__(self) -> None:
        self._contents: list[object] = []
        self._can_change = False
        """True if one of them is a list or dict."""

    def has(self, contents: list[object]) -> bool:
        """True if these are the same objects, and cannot have changed."""
        return not self._can_change and are_same(contents, self._contents)

    def keep(self, contents: list[object]) -> None:
        """Note these objects as inspected."""
        self._contents = contents
        self._can_change = any(isinstance(each, list | dict) for each in contents)
