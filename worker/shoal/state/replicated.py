"""State of a replicated model and its optimizer: collected by name, and restored."""

from collections.abc import Iterable, Mapping, Sequence, Set
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
    put_slots,
    refuse_other_owners,
    set_settings,
    settings_of,
    take_settings,
    take_slots,
)
from shoal.state.plain_values import fault_of
from shoal.state.shards import (
    DTYPES,
    MODEL,
    OPTIM,
    SETTING,
    TRANSIENT,
    Json,
    StateShard,
    TensorShard,
)
from shoal.torch_private.tensors import foreach_copy_
from shoal_proto.errors import DtypeMismatch, InvalidSpec, ShapeMismatch


class ReplicatedState:
    """Reads and writes everything that training changes in a model and its optimizer.

    Raises InvalidSpec if the optimizer has other parameters, or if a tensor cannot be sent.
    """

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

    def collect(self, step: int) -> StateShard:
        """Return everything that training changes, not copied, valid until the next step.

        Reads no number from a tensor: that would wait for a GPU. Raises UnsupportedOptimizer for
        state that another member could not restore.
        """
        tensors = self._tensors()
        slots: dict[str, Json] = {}
        refuse_other_owners(self._optimizer, self._names)
        for owner, state in self._optimizer.state.items():
            name = self.name_of(owner)
            own = take_slots(state, name, self._optimizer)
            tensors |= {f"{OPTIM}{name}/{key}": t.detach() for key, t in own.tensors.items()}
            if own.values:
                slots[name] = dict(own.values)
        groups: list[Json] = []
        settings = take_settings(self._optimizer, with_tensors=False)
        for index, group in enumerate(self._optimizer.param_groups):
            names: list[Json] = [self.name_of(parameter) for parameter in group["params"]]
            groups.append({"params": names, **settings[index]})
            for key, value in group.items():
                if isinstance(value, Tensor):
                    tensors[f"{SETTING}{index}/{key}"] = value.detach()
        kinds, further = kinds_of(self._optimizer), dict(tied(self._model))
        values: dict[str, Json] = {"groups": groups, KINDS: [*kinds], "tied": {**further}}
        shards = {name: TensorShard.whole(tensor) for name, tensor in tensors.items()}
        return StateShard(
            step=step, shards=shards, values={**values, SLOTS: slots} if slots else values
        )

    def state_shard(self, step: int) -> StateShard:
        """Return the part of `collect` that a checkpoint contains."""
        now = self.collect(step)
        shards = {
            name: shard
            for name, shard in now.shards.items()
            if not name.startswith((TRANSIENT, SETTING))
        }
        held: Any = now.values["groups"]
        settings = take_settings(self._optimizer)
        groups: list[Json] = [
            {"params": group["params"], **own} for group, own in zip(held, settings, strict=True)
        ]
        return StateShard(step=step, shards=shards, values={**now.values, "groups": groups})

    @torch.no_grad()
    def capture(self, step: int, into: StateShard | None = None) -> StateShard:
        """Return a copy of the current state, in the memory of `into` if it fits."""
        now = self.collect(step)
        before = into.shards if into is not None else {}
        copies: dict[str, TensorShard] = {}
        for name, shard in now.shards.items():
            kept = before.get(name)
            if kept is None or not fits(kept.tensor, shard.tensor):
                kept = TensorShard.whole(torch.empty_like(shard.tensor))
            copies[name] = kept
        foreach_copy_(
            [shard.tensor for shard in copies.values()],
            [shard.tensor for shard in now.shards.values()],
        )
        return StateShard(step=step, shards=copies, values=now.values)

    @torch.no_grad()
    def restore(self, state_shard: StateShard) -> None:
        """Load a whole state.

        Raises ShapeMismatch or DtypeMismatch if the state belongs to another model, and InvalidSpec
        if it belongs to another optimizer; then nothing is changed.
        """
        own, given = self._tensors(), state_shard.shards
        check_no_more(names_in(self._model), given)
        not_own = {name for name in given if name.startswith(TRANSIENT)} - own.keys()
        for name in sorted(not_own):
            _check(name, None, given[name].tensor)
        # A checkpoint has no transient buffers.
        own = {name: t for name, t in own.items() if name in given or name.startswith(MODEL)}
        for name, tensor in own.items():
            _check(name, tensor, given[name].tensor if name in given else None)
        groups = [list(map(self.name_of, g["params"])) for g in self._optimizer.param_groups]
        settings = _settings_of(state_shard)
        check_same_optimizer(self._optimizer, groups, {**state_shard.values, "groups": settings})
        for name, tensor in own.items():
            tensor.copy_(given[name].tensor)
        tensors = {
            path.removeprefix(OPTIM): shard.tensor
            for path, shard in given.items()
            if path.startswith(OPTIM)
        }
        self._put_slots(tensors, merged([state_shard.values]))
        set_settings(self._optimizer, settings)

    def buffers(self) -> dict[str, Tensor]:
        """Return all buffers by their names in a state."""
        persistent = persistent_buffers(self._model)
        named = {MODEL + name: buffer.detach() for name, buffer in persistent.items()}
        for name, buffer in self._model.named_buffers():
            if name not in persistent:
                named[TRANSIENT + name] = buffer.detach()
        return named

    def _tensors(self) -> dict[str, Tensor]:
        parameters = {MODEL + name: each.detach() for name, each in self.parameters.items()}
        return {**parameters, **self.buffers()}

    def _put_slots(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        by_parameter: dict[str, dict[str, Tensor]] = {name: {} for name in values}
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            # A copy: the given state may be in use elsewhere.
            own = place_state(self.parameters[name], key, tensor, self._optimizer)
            by_parameter.setdefault(name, {})[key] = own
        self._optimizer.state.clear()
        for name, own_tensors in by_parameter.items():
            slots = Slots(tensors=own_tensors, values=values.get(name, {}))
            self._optimizer.state[self.parameters[name]].update(put_slots(slots))


def _settings_of(state_shard: StateShard) -> list[dict[str, Any]]:
    settings = settings_of(state_shard.values)
    for name, shard in state_shard.shards.items():
        if name.startswith(SETTING):
            index, _, key = name.removeprefix(SETTING).partition("/")
            settings[int(index)][key] = shard.tensor
    return settings


def place_state(parameter: Tensor, key: str, tensor: Tensor, optimizer: Optimizer) -> Tensor:
    """Return a copy of a tensor of the optimizer's state, on the parameter's device. Exception:
    `step` and `mu_product` stay on the given device, unless the group is fused or capturable, as
    the optimizer reads them on the host. A tensor of the parameter's shape gets its strides."""
    own = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    by_kernels = own.get("fused") or own.get("capturable")
    # NAdam, too, reads `mu_product` on the host in each step.
    if key in {"step", "mu_product"} and not by_kernels:
        return tensor.clone()
    if tensor.shape and tensor.shape == parameter.shape:
        # Fused kernels pair the elements of state and parameter by their position in memory.
        return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return tensor.to(parameter.device, copy=True)


def fits(kept: Tensor | None, tensor: Tensor) -> TypeGuard[Tensor]:
    """True if `tensor` can be copied into `kept` unchanged."""
    return kept is not None and (kept.shape, kept.dtype, kept.device) == (
        *(tensor.shape, tensor.dtype, tensor.device),
    )


def refuse_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise InvalidSpec if a tensor cannot be given to another member."""
    for name, tensor in tensors.items():
        if fault := fault_of(tensor):
            raise InvalidSpec(
                f"the model's tensor {name} cannot be handed to another member",
                seen=fault,
                expected=f"dense tensors of {', '.join(DTYPES)}",
                fix="Keep it in one of these dtypes, or, if it is not part of the model, as an"
                " attribute that is not a buffer.",
            )


def names_in(model: nn.Module) -> Set[str]:
    """Return the names of all parameters and buffers; a tied one has several."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return {name for each in (parameters, buffers) for name, _ in each}


def check_no_more(own: Set[str], names: Iterable[str]) -> None:
    """Raise ShapeMismatch if a state names a tensor that the model lacks."""
    for name in sorted(names):
        if name.startswith(MODEL) and name.removeprefix(MODEL) not in own:
            raise ShapeMismatch(
                "the state does not fit the model, which lacks a tensor",
                seen=f"{name.removeprefix(MODEL)} in the state",
                expected="parameters and buffers of the model",
            )


def missing(name: str, shape: Sequence[int]) -> ShapeMismatch:
    return ShapeMismatch(
        f"the state does not fit the model at {name}",
        seen="missing",
        expected=f"shape {tuple(shape)}",
    )


def _check(name: str, own: Tensor | None, given: Tensor | None) -> None:
    name = name.removeprefix(MODEL)
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
