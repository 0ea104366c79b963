"""State of a replicated model and its optimizer: collected by name, and restored."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.model.same_optimizer import KINDS, check_same_optimizer, kinds_of
from shoal.model.tied_tensors import persistent_buffers, tied
from shoal.state.optimizer_state import (
    SLOTS,
    Slots,
    merged,
    put_settings,
    put_slots,
    refuse_other_owners,
    take_settings,
    take_slots,
)
from shoal.state.plain_values import fault_of
from shoal.state.shards import DTYPES, MODEL, OPTIM, Json, StateShard, TensorShard
from shoal.torch_private.tensors import foreach_copy_
from shoal_proto.errors import DtypeMismatch, InvalidSpec, ShapeMismatch

OPTIMIZER = "optimizer/"
"""Prefix of the optimizer's tensors in a `State`, before the parameter's name."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that training changes, by name: a member that joins continues from it."""

    step: int
    """Number of optimizer steps taken."""
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Json] = field(default_factory=dict)
    """Values that are not tensors: hyperparameters, counters."""


class ReplicatedState:
    """Reads and writes everything that training changes in a model and its optimizer. Raises
    InvalidSpec if the optimizer has a parameter that is not the model's: its values would differ
    between members. Also raises it for tensors of the model that cannot be sent to another
    member."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_tensors({**dict(model.named_parameters()), **dict(model.named_buffers())})
        self._optimizer = optimizer
        self.parameters = dict(model.named_parameters())
        self._model = model
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter not in self._names:
                    raise InvalidSpec(
                        "the optimizer holds a parameter that is not the model's",
                        seen=f"parameter {position} of group {index}: {tuple(parameter.shape)}",
                        expected="parameters of the model that is distributed with it",
                        fix="Distribute one module that holds all these parameters.",
                    )

    def name_of(self, parameter: Tensor) -> str:
        """Return the parameter's name in the model."""
        return self._names[parameter]  # type: ignore[index]

    def collect(self, step: int) -> State:
        """Return the state, not copied, valid until the next step. Raises UnsupportedOptimizer."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"parameter/{name}"] = parameter.detach()
        for name, buffer in self._model.named_buffers():
            tensors[f"buffer/{name}"] = buffer.detach()
        scalars: dict[str, Json] = {}
        refuse_other_owners(self._optimizer, self._names)
        for owner, state in self._optimizer.state.items():
            name = self.name_of(owner)
            slots = take_slots(state, name, self._optimizer)
            tensors |= {f"{OPTIMIZER}{name}/{key}": t.detach() for key, t in slots.tensors.items()}
            scalars[name] = dict(slots.values)
        groups: list[Json] = []
        for index, settings in enumerate(take_settings(self._optimizer)):
            group = self._optimizer.param_groups[index]
            own = {key: value for key, value in group.items() if isinstance(value, Tensor)}
            tensors |= {f"group/{index}/{key}": tensor.detach() for key, tensor in own.items()}
            groups.append({key: value for key, value in settings.items() if key not in own})
        return State(step=step, tensors=tensors, values={"scalars": scalars, "groups": groups})

    @torch.no_grad()
    def capture(self, step: int, into: State | None = None) -> State:
        """Return a copy of the current state, in the memory of `into` if it fits: `into` is
        overwritten."""
        now = self.collect(step)
        before = into.tensors if into is not None else {}
        copies = {
            name: kept if fits(kept := before.get(name), tensor) else torch.empty_like(tensor)
            for name, tensor in now.tensors.items()
        }
        foreach_copy_(list(copies.values()), list(now.tensors.values()))
        return State(step=step, tensors=copies, values=now.values)

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Load `state` into the model and the optimizer. Raises ShapeMismatch or DtypeMismatch, and
        then changes nothing."""
        own = dict(self._own())
        for name in own.keys() | {n for n in state.tensors if not n.startswith(OPTIMIZER)}:
            _check(name, own.get(name), state.tensors.get(name))
        for name, tensor in own.items():
            tensor.copy_(state.tensors[name])
        self._restore_optimizer(state)

    # --- under the names that every strategy uses ---

    def state_shard(self, step: int) -> StateShard:
        """Return the current state, not copied, as the state shard of a member that holds all."""
        now = self.collect(step)
        scalars: Any = now.values["scalars"]
        shards: dict[str, TensorShard] = {}
        for name, tensor in self._persistent().items():
            shards[MODEL + name] = TensorShard.whole(tensor.detach())
        for path, tensor in now.tensors.items():
            if path.startswith(OPTIMIZER):
                shards[OPTIM + path.removeprefix(OPTIMIZER)] = TensorShard.whole(tensor)
        groups: list[Json] = []
        settings = take_settings(self._optimizer)
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            names: list[Json] = [self.name_of(parameter) for parameter in group["params"]]
            groups.append({"params": names, **own})
        kinds = kinds_of(self._optimizer)
        common: dict[str, Json] = {
            "groups": groups,
            KINDS: [*kinds],
            "tied": dict(tied(self._model)),
        }
        if slots := {name: values for name, values in scalars.items() if values}:
            common[SLOTS] = slots
        return StateShard(step=step, shards=shards, values=common)

    @torch.no_grad()
    def adopt(self, state_shard: StateShard) -> None:
        """Load a state shard that holds the whole state. Raises ShapeMismatch or DtypeMismatch if
        it belongs to another model, and InvalidSpec if to another optimizer; then nothing is
        changed."""
        own = self._persistent()
        groups = [list(map(self.name_of, g["params"])) for g in self._optimizer.param_groups]
        check_no_more(names_in(self._model), state_shard.shards)
        for name, tensor in own.items():
            given = state_shard.shards.get(MODEL + name)
            _check(name, tensor, given.tensor if given is not None else None)
        check_same_optimizer(self._optimizer, groups, state_shard.values)
        for name, tensor in own.items():
            tensor.copy_(state_shard.shards[MODEL + name].tensor)
        tensors = {
            path.removeprefix(OPTIM): shard.tensor
            for path, shard in state_shard.shards.items()
            if path.startswith(OPTIM)
        }
        self._put_slots(tensors, merged([state_shard.values]))
        put_settings(self._optimizer, state_shard.values)

    def _persistent(self) -> Mapping[str, Tensor]:
        return {**self.parameters, **persistent_buffers(self._model)}

    def _own(self) -> Mapping[str, Tensor]:
        """Return the tensors that exist before training: parameters, buffers, tensor settings."""
        named = self.collect(0).tensors
        return {name: t for name, t in named.items() if not name.startswith(OPTIMIZER)}

    def _restore_optimizer(self, state: State) -> None:
        scalars: Any = state.values["scalars"]
        tensors = {
            n.removeprefix(OPTIMIZER): t
            for n, t in state.tensors.items()
            if n.startswith(OPTIMIZER)
        }
        self._put_slots(tensors, scalars)
        put_settings(self._optimizer, state.values)

    def _put_slots(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Set the optimizer's state: tensors by "<parameter>/<key>", values by parameter."""
        by_parameter: dict[str, dict[str, Tensor]] = {name: {} for name in values}
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            # A copy: the given state may be in use elsewhere.
            own = place_state(self.parameters[name], tensor, self._optimizer)
            by_parameter.setdefault(name, {})[key] = own
        self._optimizer.state.clear()
        for name, own_tensors in by_parameter.items():
            slots = Slots(tensors=own_tensors, values=values.get(name, {}))
            self._optimizer.state[self.parameters[name]].update(put_slots(slots))


def place_state(parameter: Tensor, tensor: Tensor, optimizer: Optimizer) -> Tensor:
    """Return a copy of a tensor of the optimizer's state, on the device where torch keeps it: the
    parameter's device. A tensor without dimensions, such as a step count, stays on its own device,
    unless the group is `fused` or `capturable`: kernels read it then."""
    own = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    by_kernels = own.get("fused") or own.get("capturable")
    if tensor.ndim or by_kernels:
        return tensor.to(parameter.device, copy=True)
    return tensor.clone()


def fits(kept: Tensor | None, tensor: Tensor) -> TypeGuard[Tensor]:
    """True if `tensor` can be copied into `kept` unchanged: same shape, dtype and device."""
    return kept is not None and (kept.shape, kept.dtype, kept.device) == (
        *(tensor.shape, tensor.dtype, tensor.device),
    )


def refuse_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise InvalidSpec if one of a model's tensors cannot be given to another member."""
    for name, tensor in tensors.items():
        if fault := fault_of(tensor):
            raise InvalidSpec(
                f"the model's tensor {name} cannot be handed to another member",
                seen=fault,
                expected=f"dense tensors of {', '.join(DTYPES)}",
                fix="Keep it in one of these dtypes, or, if it is no state of the model, as an"
                " attribute that is no buffer.",
            )


def names_in(model: nn.Module) -> Set[str]:
    """Return the names of all parameters and buffers of the model; a tied one has several."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name for each in (parameters, buffers) for name, _ in each}


def check_no_more(own: Set[str], names: Iterable[str]) -> None:
    """Raise ShapeMismatch if a state names a tensor that the model lacks: loading would drop the
    tensor, and the model would differ from the model that wrote the state."""
    for name in sorted(names):
        if name.startswith(MODEL) and name.removeprefix(MODEL) not in own:
            raise ShapeMismatch(
                "the state does not fit the model, which lacks a tensor",
                seen=f"{name.removeprefix(MODEL)} in the state",
                expected="parameters and buffers of the model",
            )


def missing(name: str, shape: Sequence[int]) -> ShapeMismatch:
    """Return the error for a tensor of the model that a state lacks."""
    return ShapeMismatch(
        f"the state does not fit the model at {name}",
        seen="missing",
        expected=f"shape {tuple(shape)}",
    )


def _check(name: str, own: Tensor | None, given: Tensor | None) -> None:
    if own is not None and given is None:
        raise missing(name, own.shape)
    if own is None or given is None:
        raise ShapeMismatch(
            f"the state does not fit the model at {name}",
            seen="missing" if given is None else f"shape {tuple(given.shape)}",
            expected="nothing of that name",
        )
    if own.shape != given.shape:
        raise ShapeMismatch(
            f"the state does not fit the model at {name}",
            seen=str(tuple(given.shape)),
            expected=str(tuple(own.shape)),
        )
    if own.dtype != given.dtype:
        raise DtypeMismatch(
            f"the state does not fit the model at {name}",
            seen=str(given.dtype),
            expected=str(own.dtype),
        )
