"""Passes of the step in progress: which gradients count, and what is undone if the step fails."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.layouts import local_step
from shoal.model.local_parts import local_part
from shoal.model.several import (
    SeveralModels,
    SeveralOptimizers,
    Training,
    optimizers_of,
    parts_due,
)
from shoal.strategies.rollback.buffer_snapshot import BufferSnapshot
from shoal.strategies.rollback.writes.script_writes import ScriptWrites
from shoal.strategies.rollback.writes.state_writes import StateWrites
from shoal_proto.errors import GenerationBroken, InvalidSpec, StateLost


class EarlyUpdates:
    """Updates of some of several optimizers within a step. They are undone if the step fails:
    tensors that an update changes are copied before its first update."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors by identity, each with its content before."""
        self._states: dict[Optimizer, dict[Tensor, dict[str, Any]]] = {}
        self._state_tensors: dict[int, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def keep(self, optimizers: Iterable[Optimizer], held: Iterable[Tensor]) -> None:
        """Copy tensors and optimizers' state that an update is about to change."""
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
        """Undo the updates: the step does not happen."""
        for own, before in (*self._tensors.values(), *self._state_tensors.values()):
            own.copy_(before)
        for optimizer, states in self._states.items():
            optimizer.state.clear()
            optimizer.state.update(states)
        self.forget()

    @property
    def of_state(self) -> Collection[int]:
        """Ids of the tensors that were in the optimizers' state when they stepped."""
        return self._state_tensors.keys()

    def forget(self) -> None:
        """Discard the copies, as a step is committed or begins."""
        self._tensors.clear()
        self._states.clear()
        self._state_tensors.clear()


class StepPasses:
    """State of the passes of the present step; one object for all steps."""

    def __init__(self) -> None:
        self.in_step = False
        self.weighted = False
        """True if the step had a backward pass weighted by this member's share."""
        self.training: Training | None = None
        """The optimizer of each model, if there are several optimizers."""
        self.chosen: frozenset[str] = frozenset()
        """The optimizers for the next pass, clipping or update."""
        self.due: frozenset[str] = frozenset()
        """The optimizers that have gradients."""
        self.updates = EarlyUpdates()
        self.is_whole = True
        """True if parameters are those of a committed step, also after a failed step."""
        self._writes = ScriptWrites()
        self._state_writes = StateWrites()
        self._optimizers: Sequence[Optimizer] = ()
        self._computes = False
        self._weighing = _Weighing(self._weighs)
        self._buffers = BufferSnapshot()

    def train(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Set the model and optimizer of all passes, in all generations."""
        self._optimizers = list(optimizers_of(optimizer).values())
        if isinstance(model, SeveralModels) and isinstance(optimizer, SeveralOptimizers):
            self.training = Training(model, optimizer)

    def models(self, optimizers: frozenset[str]) -> frozenset[str]:
        """The models that these optimizers train; a single model has the empty name."""
        return frozenset([""]) if self.training is None else self.training.models_of(optimizers)

    def take(self, call: str) -> frozenset[str]:
        """Return the chosen optimizers. Raises InvalidSpec if one of them has no gradients."""
        if missing := self.chosen - self.due:
            raise InvalidSpec(
                f"{call} of an optimizer that has no gradients in this step",
                seen=", ".join(sorted(missing)),
                expected="session.backward(loss, optimizer=...) of it before",
            )
        return self.chosen

    def update(self, optimizer: Optimizer, names: frozenset[str], held: Sequence[Tensor]) -> None:
        """Step these optimizers within the step, with complete gradients. `held`: the tensors of
        their models that this changes on this member."""
        assert isinstance(optimizer, SeveralOptimizers), "one that is alone is not updated early"
        optimizer.due = names
        self._writes.updating()
        self._state_writes.note()
        self.updates.keep(parts_due(optimizer), held)
        local_step.step(optimizer)
        self._state_writes.updated(self.updates.of_state)
        for each in parts_due(optimizer):
            each.zero_grad(set_to_none=True)
        self.due -= names

    def updated(self) -> None:
        """Note that all members have the values that `update` has changed."""
        self._writes.updated()

    def aim(self, optimizer: Optimizer) -> None:
        """Settle the step, and select the optimizers that have gradients for its end."""
        self.settle()
        if isinstance(optimizer, SeveralOptimizers):
            optimizer.due = self.due

    def settle(self) -> None:
        """Note that all passes of the step are made: from here until the commit, changes are the
        session's own. Raises InvalidSpec as `settle_buffers`."""
        self._buffers.settle()
        self._writes.settle()
        self._state_writes.settle()

    def parameters(self, optimizer: Optimizer) -> list[Tensor]:
        """List the parameters of the chosen optimizers."""
        return [
            one
            for name, each in optimizers_of(optimizer).items()
            if name in self.chosen
            for group in each.param_groups
            for one in group["params"]
        ]

    def begin(
        self, model: nn.Module | None = None, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        """Begin a step. If it fails, changes that passes and the script make to the buffers of
        `model` and to `parameters` (see `ScriptWrites.begin`) are undone."""
        if model is not None:
            self._buffers.keep(model)
        if parameters is not None:
            self._writes.begin(parameters)
            self._state_writes.begin(self._optimizers)
        self.is_whole = True
        self.in_step, self.weighted = True, False
        self.due = frozenset()
        self.updates.forget()

    def settle_buffers(self) -> None:
        """Copy the contents of replaced buffers into the model's own, before state is collected.

        Raises InvalidSpec if a replacement does not fit.
        """
        self._buffers.settle()

    def state_as_begun(self) -> AbstractContextManager[None]:
        """Return a context in which optimizers have their state from when the step began."""
        return self._state_writes.as_begun()

    def as_begun(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies, from when the step began, of the held tensors that may have changed since.

        Raises GenerationBroken if the script has written to parameters that have no copy: this
        member no longer holds the state of the last committed step.
        """
        self._writes.note(closely=True)
        self._state_writes.note()
        if self._writes.is_lost or self._state_writes.is_lost:
            raise GenerationBroken(
                "the script has written to weights, or to the optimizer's state, for the first"
                " time, in a step that other members keep a copy of"
            )
        parameters, buffers = self._writes.before, self._buffers.before()
        found = {name: buffers[id(each)] for name, each in held.items() if id(each) in buffers}
        return {**found, **{name: copy for name, copy in parameters.items() if name in held}}

    def check_buffers(self, step: int) -> None:
        """Raise InvalidSpec if a pass of this step has changed a buffer outside the model's
        state_dict. `step`: the number of committed steps before it."""
        if changed := self._buffers.changed():
            raise InvalidSpec(
                f"the model has changed buffers in step {step} that are not in its state_dict",
                seen=", ".join(changed[:5]),
                expected="buffers that change to be persistent: a member that joins, and a"
                " generation that begins, have the others as the model was made with",
                fix="register_buffer(name, tensor), without persistent=False; or strategy 'ddp'.",
            )

    def commit(self) -> None:
        """Note that the step is committed."""
        self.in_step = False
        self._buffers.clear()
        self.updates.forget()

    def undo(self) -> bool:
        """Undo the step in progress, if there is one; True if there was."""
        was_in_step, self.in_step = self.in_step, False
        if was_in_step:
            # Find the script's own writes first: they came before the updates, and undoing an
            # update writes to the same weights.
            self._writes.note(closely=True)
            self._state_writes.note()
            self.updates.restore()
            self._buffers.restore()
            has_state = self._state_writes.restore()
            self.is_whole = self._writes.restore() and has_state
        return was_in_step

    def check_whole(self, step: int) -> None:
        """Raise StateLost if a failed step has left weights that belong to no committed step."""
        if not self.is_whole:
            raise StateLost(
                f"step {step} was not taken, and its weights cannot be given back what they held",
                seen="weights, or state of the optimizer, that the script wrote to for the first"
                " time, in that step",
                expected="writes from the first step on, or after a step",
                fix="Start the job again from a checkpoint.",
            )

    def forget(self) -> None:
        """Release the model."""
        self._buffers.forget()
        self._writes.forget()
        self._state_writes.forget()

    def ours(self) -> bool:
        """True if a gradient may arrive now: the session asked for it, or no step has begun."""
        return self._computes or not self.in_step

    def weighing(self) -> AbstractContextManager[None]:
        """Return a context for a backward pass whose loss is weighted by this member's share."""
        return self._weighing

    def _weighs(self, begins: bool) -> None:
        self._computes = begins
        if begins:
            self.weighted = True
            self.due |= self.chosen


class _Weighing:
    """Context that reports the beginning and the end of a pass, even if the pass raises."""

    def __init__(self, says: Callable[[bool], None]) -> None:
        self._says = says

    def __enter__(self) -> None:
        self._says(True)

    def __exit__(self, *_: object) -> None:
        self._says(False)
