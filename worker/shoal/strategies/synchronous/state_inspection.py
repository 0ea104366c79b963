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
        self._state = _Seen()
        self._settings = _Seen()

    def inspect(self, optimizer: Optimizer, look: Callable[[], object]) -> ShoalError | None:
        """What `look`, which collects all of the state, refuses it with; None for what it takes.

        Raises UnsupportedOptimizer for a setting, which all members have alike.
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
                return error
            self._state.keep(state)
        return None


class _Seen:
    """Objects that were looked at."""

    def __init__(self) -> None:
        self._contents: list[object] = []
        self._can_change = False
        """Whether one of them holds others."""

    def has(self, contents: list[object]) -> bool:
        """True if these are the same, and hold what they held."""
        return not self._can_change and are_same(contents, self._contents)

    def keep(self, contents: list[object]) -> None:
        """These were looked at."""
        self._contents = contents
        self._can_change = any(isinstance(each, list | dict) for each in contents)
