"""A look at what an optimizer keeps, behind each step: whether it can be handed to a member."""

from collections.abc import Callable

from torch.optim import Optimizer

from shoal.model.several import optimizers_of
from shoal.model.trained_parameters import are_same
from shoal.state.optimizer_state import take_settings
from shoal_proto.errors import ShoalError, UnsupportedOptimizer


class StateInspection:
    """One optimizer's, step by step. What is the same as behind the last step is not looked at
    again: in nearly every step all of it, but for numbers that count."""

    def __init__(self) -> None:
        self._state: list[object] = []
        self._settings: list[object] = []

    def inspect(self, optimizer: Optimizer, look: Callable[[], object]) -> ShoalError | None:
        """What `look`, which collects all of the state, refuses it with; None for what it takes.

        Raises UnsupportedOptimizer for a setting, which all members have alike.
        """
        optimizers = optimizers_of(optimizer).values()
        groups = (group for each in optimizers for group in each.param_groups)
        settings = [v for group in groups for key, v in group.items() if key != "params"]
        if not _is_known(settings, self._settings):
            take_settings(optimizer)
        state: list[object] = []
        for each in optimizers:
            for owner, kept in each.state.items():
                state.append(owner)
                state += kept.values() if isinstance(kept, dict) else [kept]
        self._settings = settings
        try:
            if not _is_known(state, self._state):
                look()
        except UnsupportedOptimizer as error:
            return error
        self._state = state
        return None


def _is_known(now: list[object], before: list[object]) -> bool:
    """True if these are the same objects as before, none of which holds others."""
    return are_same(now, before) and not any(isinstance(each, list | dict) for each in now)
