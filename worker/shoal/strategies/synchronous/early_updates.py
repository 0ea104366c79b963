"""What changes parameters within a step before the optimizer's step at its end: updates of one of
several optimizers, and what the script writes itself. Both are taken back with a step that does not
happen."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.model.local_parts import local_part
from shoal.torch_private.tensors import num_writes

log = structlog.get_logger(__name__)

FIRST_STEPS, EVERY_STEPS = 4, 64
"""In the first steps, and in one of so many, elements are compared: torch does not count what is
written by way of `.data`."""
NUM_ELEMENTS = 4
"""So many of each parameter are."""


class EarlyUpdates:
    """Those of the step under way: what they change is kept as it was before the first of them."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[Optimizer, dict[Tensor, dict[str, Any]]] = {}

    @torch.no_grad()
    def keep(self, optimizers: Iterable[Optimizer], held: Iterable[Tensor]) -> None:
        """The optimizers are about to step, which changes the tensors that are held."""
        for optimizer in optimizers:
            if optimizer not in self._states:
                self._states[optimizer] = {
                    parameter: {key: _copy(value) for key, value in state.items()}
                    for parameter, state in optimizer.state.items()
                }
        for tensor in held:
            if id(tensor) not in self._tensors:
                own = local_part(tensor)
                self._tensors[id(tensor)] = (own, own.clone())

    @torch.no_grad()
    def restore(self) -> None:
        """The step does not happen."""
        for own, before in self._tensors.values():
            own.copy_(before)
        for optimizer, states in self._states.items():
            optimizer.state.clear()
            optimizer.state.update(states)
        self.forget()

    def forget(self) -> None:
        """The step is committed, or begins."""
        self._tensors.clear()
        self._states.clear()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True, kw_only=True)
class _Before:
    """A parameter when a step began, or behind the newest update within it."""

    parameter: nn.Parameter
    num_writes: int
    elements: Tensor | None
    """Some of them, where they are looked at."""
    copy: Tensor | None
    """When the step began, where the script is known to write to such parameters."""

    @property
    def is_written(self) -> bool:
        """Whether somebody has written to it since."""
        if num_writes(self.parameter) != self.num_writes:
            return True
        return self.elements is not None and not torch.equal(
            self.elements, _elements(self.parameter)
        )

    def now(self) -> "_Before":
        """The same parameter, as it is behind what the session has done to it."""
        elements = None if self.elements is None else _elements(self.parameter)
        return replace(self, num_writes=num_writes(self.parameter), elements=elements)


class ScriptWrites:
    """What a script writes to parameters within a step: to those that are trained, as
    sharpness-aware minimisation does between two passes, or to those that are not, as a teacher's
    that follow its student's.

    A script that does no such thing is not to pay for copies. So its first step that writes says
    to which of the two kinds, and from the next one on these are copied when a step begins.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._parameters: Sequence[nn.Parameter] = ()
        self._before: Sequence[_Before] = ()
        self._written: frozenset[bool] = frozenset()
        """Whether those that the script writes to require a gradient. Over all generations."""
        self._is_lost = False
        """Whether a parameter was written to in this step of which there is no copy."""
        self._num_steps = 0

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """A step begins."""
        # Going through the modules of a model takes longer than all else here.
        if self._model is not model:
            self._model, self._parameters = model, list(model.parameters())
        looks = self._num_steps < FIRST_STEPS or self._num_steps % EVERY_STEPS == 0
        self._num_steps += 1
        self._is_lost = False
        self._before = [
            _Before(
                parameter=each,
                num_writes=num_writes(each),
                elements=_elements(each) if looks else None,
                copy=local_part(each).clone() if each.requires_grad in self._written else None,
            )
            for each in self._parameters
        ]

    @torch.no_grad()
    def note(self) -> None:
        """The session is about to change parameters: what has changed by now the script wrote."""
        written = [each for each in self._before if each.is_written]
        self._written |= {each.parameter.requires_grad for each in written}
        self._is_lost = self._is_lost or any(each.copy is None for each in written)

    @torch.no_grad()
    def updated(self) -> None:
        """The session has changed parameters within the step."""
        self._before = [each.now() for each in self._before]

    @torch.no_grad()
    def restore(self) -> bool:
        """The step does not happen; whether its parameters are again as when it began."""
        for each in self._before:
            if each.copy is not None:
                local_part(each.parameter).copy_(each.copy)
        if self._is_lost:
            log.warning(
                "step_not_undone",
                seen="parameters that the script wrote to, in a step that did not happen",
                expected="the state of a member that holds it, a copy or a checkpoint",
            )
        self.clear()
        return not self._is_lost

    def clear(self) -> None:
        """From here on the step changes parameters by the optimizer alone, or it is over."""
        self._before = ()

    def forget(self) -> None:
        """Let go of the model too."""
        self._model, self._parameters, self._before = None, (), ()


def _elements(parameter: nn.Parameter) -> Tensor:
    flat = local_part(parameter).reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_ELEMENTS)].clone()
