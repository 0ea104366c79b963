"""Writes of a script, within a step, to parameters and optimizers' state."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.model.local_parts import placed_like
from shoal.model.trained_parameters import are_same
from shoal.state.optimizer_state import contents_of, set_settings
from shoal.strategies.rollback.parameter_watch import OwnParts, ParameterWatch, own_parts
from shoal.torch_private.tensors import all_writes, num_writes

FIRST_STEPS = 3
"""Number of steps in which each parameter is saved: a teacher model that began as a copy of its
student may change only in the third step.
"""

CopyOf = Callable[[object], Tensor | None]


class ParameterWrites:
    """Writes of a script to parameters within a step, as in sharpness-aware minimisation.

    In the first steps all parameters are saved. Later only parameters that the script has written
    to are saved; the others are watched. The first write to a watched parameter cannot be undone.
    """

    def __init__(self) -> None:
        self._parameters: Mapping[str, Tensor] = {}
        self._watch = ParameterWatch({})
        self._num_steps: dict[str, int] = {}
        """Number of steps in which a parameter was saved, in all generations."""
        self._names: set[str] = set()
        """Parameters that the script has written to, in all generations."""
        self._saved: list[Tensor] = []
        self._fresh: dict[str, Tensor] = {}
        self._is_planned = self._is_watched = False
        self._is_updated = False

    def begin(self, parameters: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Begin a step; return the written parameters and those in their first steps, to be
        saved.
        """
        if parameters is not self._parameters:
            self._parameters, self._is_planned = parameters, False
        if not self._is_planned:
            self._plan()
        self._watch.mark()
        self._is_watched, self._is_updated = True, False
        return self._saved, list(self._fresh.values())

    def _plan(self) -> None:
        held = OwnParts(self._parameters).parameters
        watched = {name: each for name, each in held.items() if name not in self._names}
        self._saved = [each for name, each in held.items() if name in self._names]
        self._fresh = {
            name: each
            for name, each in watched.items()
            if self._num_steps.get(name, 0) < FIRST_STEPS
        }
        self._watch = ParameterWatch(watched)
        self._is_planned = True

    def written(self, *, closely: bool) -> list[Tensor]:
        """Return the watched parameters that were written to. `closely`: see `ParameterWatch`."""
        written = self._watch.changed(closely=closely) if self._is_watched else set()
        if written:
            self._names |= written
            self._is_planned = False
        return [self._parameters[name] for name in written]

    def pause(self) -> None:
        """Note that the session is about to change parameters within the step."""
        self._is_watched, self._is_updated = False, True

    def resume(self) -> None:
        """Note that the session has changed the parameters."""
        self._watch.mark()
        self._is_watched = True

    def settle(self, copy_of: CopyOf) -> None:
        """Note, after `written`, that only the optimizer changes parameters until the commit."""
        self._is_watched = False
        fresh = {name: each for name, each in self._fresh.items() if name not in self._names}
        if not fresh:
            return
        if not self._is_updated:
            self._names |= _differing(fresh, copy_of)
        for name in fresh:
            self._num_steps[name] = self._num_steps.get(name, 0) + 1
        self._is_planned = False

    def forget(self) -> None:
        """Release the model."""
        self._parameters, self._watch = {}, ParameterWatch({})
        self._saved, self._fresh, self._is_watched = [], {}, False


@torch.no_grad()
def _differing(parameters: Mapping[str, Tensor], copy_of: CopyOf) -> set[str]:
    pairs = zip(own_parts(list(parameters.values())), parameters.values(), strict=True)
    copies = ((part, copy_of(each)) for part, each in pairs)
    are_as_begun = [
        part.eq(copy.to(part.device)).all() for part, copy in copies if copy is not None
    ]
    # Stacked, so that one read waits for all.
    flags = torch.stack([each.to(are_as_begun[0].device) for each in are_as_begun]).tolist()
    return {name for name, is_as_begun in zip(parameters, flags, strict=True) if not is_as_begun}


class StateWrites:
    """Writes of a script to optimizers' state within a step, such as a reset of momentum.

    To undo a step, the objects from its beginning are put back. Tensors that the script writes to
    in place are saved in each later step. The first write in place cannot be undone.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[Optimizer, dict[Tensor, dict[str, Any]]]] = []
        self._contents: list[object] = []
        self._keys: list[str] = []
        self._tensors: list[Tensor] = []
        self._num_writes: list[int] = []
        self._written: set[str] = set()
        """Keys of state that the script has written to in place, in all generations."""
        self._are_counted = False
        self._settings: dict[Optimizer, list[dict[str, Any]]] = {}
        """Settings of groups before the first update within the step."""

    def begin(self, optimizers: Collection[Optimizer]) -> list[Tensor]:
        """Begin a step: note the state's objects. Returns the tensors to be saved."""
        self._settings.clear()
        contents = contents_of(optimizers)
        if not are_same(contents, self._contents):
            self._note_objects(optimizers)
            self._contents = contents
        self.resume()
        if not self._written:
            return []
        pairs = zip(self._keys, self._tensors, strict=True)
        return [each for key, each in pairs if key in self._written]

    def _note_objects(self, optimizers: Iterable[Optimizer]) -> None:
        self._begun = [
            (each, {parameter: dict(state) for parameter, state in each.state.items()})
            for each in optimizers
        ]
        states = [state for _, own in self._begun for state in own.values()]
        tensors = [(k, v) for state in states for k, v in state.items() if isinstance(v, Tensor)]
        self._keys, self._tensors = [key for key, _ in tensors], [each for _, each in tensors]
        self._are_counted = not any(each.is_inference() for each in self._tensors)

    def _counts(self) -> list[int]:
        if self._are_counted:
            return all_writes(self._tensors)
        return list(map(num_writes, self._tensors))

    def written(self) -> list[Tensor]:
        """Return the tensors that were written to in place; later steps save them."""
        now = self._counts()
        if now == self._num_writes:
            return []
        counts = zip(now, self._num_writes, strict=True)
        written = [index for index, (count, before) in enumerate(counts) if count != before]
        self._written |= {self._keys[index] for index in written}
        return [self._tensors[index] for index in written]

    def save(self, optimizers: Iterable[Optimizer]) -> None:
        """Copy what these optimizers may change in place, other than tensors of their own: lists
        and dicts in the state, and the settings of groups."""
        for optimizer, states in self._begun:
            if optimizer not in optimizers or optimizer in self._settings:
                continue
            # The copies keep such a tensor, which is saved, and what several parameters share.
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            kept = [*tensors_of([optimizer]), *parameters]
            memo: dict[int, Any] = {id(each): each for each in kept}
            for state in states.values():
                state |= {key: _copied(value, memo) for key, value in state.items()}
            self._settings[optimizer] = [
                {key: _copied(value, {}) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            # The next step notes the present objects.
            self._contents = []

    def resume(self) -> None:
        """Note that changes so far are not the script's."""
        self._num_writes = self._counts()

    @contextmanager
    def state_at_step_start(self, copy_of: CopyOf) -> Iterator[None]:
        """Return a context in which optimizers have the state from the step's beginning.

        A tensor without a copy keeps its present contents.
        """
        present = [(each, dict(each.state)) for each, _ in self._begun]
        _set_state(self._begun, copy_of)
        try:
            yield
        finally:
            _set_state(present)

    def reinstall(self) -> None:
        """Put back the objects that were in the state when the step began, or their copies."""
        _set_state(self._begun)
        for optimizer, settings in self._settings.items():
            # A group that was added meanwhile has none.
            for group, before in zip(optimizer.param_groups, settings, strict=False):
                for key in group.keys() - before.keys() - {"params"}:
                    del group[key]
            set_settings(optimizer, settings)

    def forget(self) -> None:
        """Release the optimizers' state."""
        self._begun, self._contents, self._keys, self._tensors = [], [], [], []
        self._num_writes = []
        self._settings.clear()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy lists, dicts, tuples and sets with the tensors in them; keep other objects, such as
    locks and process groups. `memo`: copies by the id of the original."""
    if id(value) in memo:
        return memo[id(value)]
    made = value
    if isinstance(value, Tensor):
        made = value.detach().clone()
    elif isinstance(value, dict):
        made = copy(value)
        for key, each in value.items():
            made[key] = _copied(each, memo)
    elif isinstance(value, list):
        made = copy(value)
        made[:] = [_copied(each, memo) for each in value]
    elif type(value) is tuple:
        made = tuple(_copied(each, memo) for each in value)
    elif isinstance(value, set | deque):
        made = copy(value)
    memo[id(value)] = made
    return made


def _set_state(
    states: Iterable[tuple[Optimizer, Mapping[Tensor, dict[str, Any]]]],
    copy_of: CopyOf = lambda _: None,
) -> None:
    for optimizer, state in states:
        optimizer.state.clear()
        for parameter, values in state.items():
            optimizer.state[parameter] = {
                key: value if (copy := copy_of(value)) is None else placed_like(value, copy)
                for key, value in values.items()
            }


def tensors_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """List the tensors in the state of optimizers."""
    states = (state for each in optimizers for state in each.state.values())
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
