"""Ties a user's model and optimizer to the layout of one generation, and reads and fills its state.

The user's optimizer object stays the same over all generations; what it steps is replaced.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.layouts.base import Layout
from shoal.model.gradients import StepGradients
from shoal.model.initialisation import (
    give_buffers,
    initialised_copy,
    is_on_meta,
    mark_taken,
)
from shoal.model.local_parts import local_part, placed_like
from shoal.model.same_optimizer import KINDS, check_same_optimizer, kinds_of
from shoal.model.tied_tensors import persistent_buffers, refuse_hidden_ties, tied
from shoal.state.replicated import as_json, beside, check_no_more, missing, names_in, take_settings
from shoal.state.shards import MODEL, OPTIM, Chunk, Json, StateShard, TensorShard
from shoal.torch_private.modules import parameter_table
from shoal_proto.errors import (
    DtypeMismatch,
    InvalidSpec,
    ShapeMismatch,
    UnsupportedOptimizer,
)

# State that an optimizer keeps as a plain number travels as a scalar tensor under a marked name.
_NUMBERS: Mapping[str, type] = {"#int": int, "#float": float, "#bool": bool}


class MetaModel:
    """A model without its weights, and where each parameter stands in the optimizer.

    Raises InvalidSpec if there is nothing to train, if the optimizer holds a parameter that is not
    the model's (nobody would keep that one in step with the others), if parameters share memory
    without being one, or if a module on the meta device cannot initialise itself.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        """The user's own, with its weights until they are forgotten."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        if not any(parameter.requires_grad for parameter in names):
            raise InvalidSpec(
                "the model has nothing to train", expected="a parameter that requires a gradient"
            )
        refuse_hidden_ties(model)
        self._seed = torch.initial_seed()
        self._made_on_meta = is_on_meta(model)
        if self._made_on_meta:
            give_buffers(model)
        self.groups: list[list[str]] = []
        """Names of the parameters in each of the optimizer's groups."""
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter not in names:
                    raise InvalidSpec(
                        "the optimizer holds a parameter that is not the model's",
                        seen=f"parameter {position} of group {index}: {tuple(parameter.shape)}",
                        expected="parameters of the model that is distributed with it",
                        fix="Distribute one module that holds them all.",
                    )
            self.groups.append([names[parameter] for parameter in group["params"]])
        self.tied = tied(model)
        """For each further name of a parameter or buffer, its first."""
        held = {**dict(model.named_parameters()), **persistent_buffers(model)}
        self.without_elements = {
            name: torch.empty_like(tensor, device="cpu")
            for name, tensor in held.items()
            if not tensor.numel()
        }
        """Parameters and persistent buffers of which there is nothing to hold."""
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._given: dict[str, dict[str, Any]] = {}
        self.take_state(optimizer)

    def take_state(self, optimizer: Optimizer) -> None:
        """Keep the state that the optimizer has for the user's own parameters, if it has any: what
        the script has loaded into it before there was a layout.

        Raises UnsupportedOptimizer for what no state of a job can hold.
        """
        for parameter in self.model.parameters():
            name, state = self._names.get(id(parameter)), optimizer.state.get(parameter)
            if name is None or not state or any(map(_is_meta, state.values())):
                continue
            self._given[name] = {key: v for key, v in state.items() if v is not None}
            for key, value in self._given[name].items():
                if _as_piece(key, value) is None:
                    kind = type(value).__name__
                    raise _cannot_hand_over(optimizer, f"state {key!r} of {name}: {kind}")

    def copy(self) -> nn.Module:
        """The model once more: its parameters on the meta device, its buffers real and its own."""
        try:
            copied: nn.Module = copy.deepcopy(self.model, self._empty_parameters())
        except (TypeError, RuntimeError) as error:
            raise InvalidSpec(
                f"the model {type(self.model).__name__} cannot be copied",
                seen=str(error),
                expected="a module that copy.deepcopy can copy",
                fix="Keep locks, files, generators and tensors with a history out of its attributes"
                ", or use strategy 'ddp'.",
            ) from error
        return copied

    def initial(self) -> StateShard:
        """The weights that the user made the model with, and the state that the optimizer was given
        for them: step 0.

        Of a model that was made on the meta device those that its modules begin with, with the seed
        that the script had given torch.
        """
        model = initialised_copy(self.model, self._seed) if self._made_on_meta else self.model
        state = {**dict(model.named_parameters()), **persistent_buffers(model)}
        shards = {
            MODEL + name: TensorShard.whole(tensor.detach()) for name, tensor in state.items()
        }
        for name, given in self._given.items():
            for key, value in given.items():
                piece = _as_piece(f"{OPTIM}{name}/{key}", value)
                assert piece is not None, "looked at when it was taken"
                shards[piece[0]] = TensorShard.whole(piece[1].detach())
        return StateShard(step=0, shards=shards)

    def forget_weights(self) -> None:
        """Free the memory of the user's own parameters, and of what the optimizer was given for
        them: from now on a layout holds them.

        What was one parameter under several names still is, in this model and in each `copy`.
        """
        if not all(parameter.is_meta for parameter in self.model.parameters()):
            empty = self._empty_parameters()
            for part in self.model.modules():
                for name, parameter in parameter_table(part).items():
                    if parameter is not None and not parameter.is_meta:
                        parameter_table(part)[name] = mark_taken(empty[id(parameter)])
        self._given.clear()
        self._names.clear()

    def give_back(self, optimizer: Optimizer) -> None:
        """Let the optimizer step the user's own parameters again, with the state that it was given
        for them; unless their weights are forgotten."""
        if not self._names:
            return
        own = dict(self.model.named_parameters())
        for names, group in zip(self.groups, optimizer.param_groups, strict=True):
            group["params"] = [own[name] for name in names]
        optimizer.state.clear()
        for name, given in self._given.items():
            optimizer.state[own[name]] = dict(given)

    def _empty_parameters(self) -> dict[int, Any]:
        """One without memory for each of the model's, by its id."""
        return {
            id(parameter): nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            for parameter in self.model.parameters()
        }


class OptimizerBinding:
    """The optimizer bound to a layout's parameters; its state, and the layout's, by name."""

    def __init__(self, meta_model: MetaModel, optimizer: Optimizer, layout: Layout) -> None:
        self.layout = layout
        self.optimizer = optimizer
        self._parameters = dict(layout.parameters)
        self.held = dict(layout.held)
        self.held_parameters = {n: t for n, t in self.held.items() if isinstance(t, nn.Parameter)}
        self._known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._placed: dict[str, Tensor] = {}
        self.group_names = meta_model.groups
        self._tied = meta_model.tied
        self._model_names = names_in(meta_model.model)
        self.without_elements = meta_model.without_elements
        meta_model.take_state(optimizer)
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, meta_model.groups, strict=True):
            group["params"] = [self._parameters[name] for name in names if name in self._parameters]
        self.gradients = StepGradients(self._parameters.values(), optimizer)

    # --- reading ---

    def collect(self, step: int) -> StateShard:
        """What this rank holds, not copied: valid until the next step.

        Raises UnsupportedOptimizer for state that cannot be handed to another member.
        """
        shards = {
            MODEL + name: self.layout.shard(name, tensor) for name, tensor in self.held.items()
        }
        for name, parameter in self._parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    path, shard = self._piece_of_state(name, key, value)
                    shards[path] = shard
        kept = {path: shard for path, shard in shards.items() if shard.chunk.num_elements}
        return StateShard(step=step, shards=kept, values=self._values())

    def _piece_of_state(self, name: str, key: str, value: Any) -> tuple[str, TensorShard]:
        piece = _as_piece(f"{OPTIM}{name}/{key}", value)
        if piece is None:
            raise self._cannot_hand_over(f"state {key!r} of {name}: {type(value).__name__}")
        path, value = piece
        if value.ndim == 0:
            return path, TensorShard.whole(local_part(value))
        parameter = self._parameters[name]
        if value.shape == parameter.shape:
            return path, self.layout.shard(name, value)
        whole = self.layout.shard(name, parameter)
        if whole.chunk.sizes != whole.shape:
            raise self._cannot_hand_over(
                f"state {key!r} of {name}: shape {tuple(value.shape)} for a parameter of"
                f" {whole.shape} that is cut"
            )
        return path, TensorShard.whole(local_part(value))

    def model(self, step: int) -> StateShard:
        """This rank's part of the model, for all ranks to have the same whole of.

        A buffer, such as a running mean, may differ between ranks: the rank that writes it into
        checkpoints is the only one to give it.
        """
        given = {
            MODEL + name: self.layout.shard(name, tensor)
            for name, tensor in self.held.items()
            if isinstance(tensor, nn.Parameter) or self.layout.counts(name)
        }
        kept = {path: shard for path, shard in given.items() if shard.chunk.num_elements}
        return StateShard(step=step, shards=kept, values={"tied": dict(self._tied)})

    def _values(self) -> dict[str, Json]:
        kinds = kinds_of(self.optimizer)
        return {"groups": self._settings(), KINDS: [*kinds], "tied": dict(self._tied)}

    def _settings(self) -> list[Json]:
        groups: list[Json] = []
        for names, group in zip(self.group_names, self.optimizer.param_groups, strict=True):
            settings: dict[str, Json] = {"params": list(names)}
            for key, value in group.items():
                if key == "params":
                    continue
                if isinstance(value, Tensor):
                    settings[key] = {"tensor": value.tolist()}
                else:
                    settings[key] = as_json(value, f"setting {key!r}", self.optimizer)
            groups.append(settings)
        return groups

    def _cannot_hand_over(self, seen: str) -> UnsupportedOptimizer:
        return _cannot_hand_over(self.optimizer, seen)

    @property
    def known(self) -> frozenset[str]:
        """Names of all tensors of the state that this rank was filled from."""
        return frozenset(self._known)

    def writes(self, name: str) -> bool:
        """Whether this rank writes its shard of this name into a checkpoint."""
        if name.startswith(MODEL):
            return self.layout.counts(name.removeprefix(MODEL))
        return self.layout.counts(name.removeprefix(OPTIM).rpartition("/")[0])

    # --- filling ---

    def place(self, name: str, chunk: Chunk) -> Tensor | None:
        """Memory of the layout's own for this chunk of a tensor, which `needs` gave; `fill` finds
        there what is put into it. None where none of that size lies on the host."""
        shape, dtype = self._known[name]
        if name.startswith(MODEL):
            key = name.removeprefix(MODEL)
            own = self.layout.shard(key, self.held[key])
        else:
            key = name.removeprefix(OPTIM).rpartition("/")[0]
            own = self.layout.shard(key, self._parameters[key])
        # What has no dimension lies where the optimizer wants it: see `beside`.
        if not shape or own.shape != shape or own.chunk != chunk or own.tensor.device.type != "cpu":
            return None
        is_model = name.startswith(MODEL)
        place = own.tensor if is_model else torch.empty_like(own.tensor, dtype=dtype)
        self._placed[name] = place
        return place

    def needs(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk | None:
        """The chunk that this rank needs of a tensor of a state; None if it needs nothing of it.

        Raises ShapeMismatch or DtypeMismatch if the state is that of another model.
        """
        self._known[name] = (shape, dtype)
        if name.startswith(MODEL):
            own = self.held.get(name.removeprefix(MODEL))
            if own is None:
                return None
            _check(name, own, shape, dtype)
            chunk = self.layout.chunk(name.removeprefix(MODEL), own)
            return chunk if chunk.num_elements else None
        parameter_name, _, _ = name.removeprefix(OPTIM).rpartition("/")
        parameter = self._parameters.get(parameter_name)
        if parameter is None or not name.startswith(OPTIM):
            return None
        chunk, whole = self.layout.chunk(parameter_name, parameter), tuple(parameter.shape)
        if shape == whole:
            return chunk if chunk.num_elements else None
        if shape and chunk.sizes != whole:
            raise self._cannot_hand_over(f"{name}: {shape} for a parameter of {whole}")
        return Chunk.whole(shape)

    @torch.no_grad()
    def fill(self, state_shard: StateShard) -> None:
        """Make the state this rank's; `needs` was asked for every name in it before.

        Raises ShapeMismatch if a parameter or buffer is not in it, and InvalidSpec if it is that of
        another optimizer.
        """
        check_no_more(self._model_names, self._known)
        chunks = {name: self.layout.chunk(name, tensor) for name, tensor in self.held.items()}
        chunks = {name: chunk for name, chunk in chunks.items() if chunk.num_elements}
        for name in chunks:
            if MODEL + name not in state_shard.shards:
                raise missing(name, tuple(self.held[name].shape))
        check_same_optimizer(self.optimizer, self.group_names, state_shard.values)
        for name, chunk in chunks.items():
            tensor, given = self.held[name], state_shard.shards[MODEL + name]
            if given.chunk != chunk:
                raise ShapeMismatch(
                    f"the state does not fit the model at {name}",
                    seen=f"{given.chunk}",
                    expected=f"{chunk} of {tuple(tensor.shape)}",
                )
            if given.tensor is not self._placed.get(MODEL + name):
                self.layout.shard(name, tensor).tensor.copy_(given.tensor)
        self._fill_optimizer(state_shard)
        self._placed.clear()
        take_settings(self.optimizer, state_shard)

    def _fill_optimizer(self, state_shard: StateShard) -> None:
        self.optimizer.state.clear()
        for path, (shape, dtype) in self._known.items():
            name, _, key = path.removeprefix(OPTIM).rpartition("/")
            parameter = self._parameters.get(name)
            if not path.startswith(OPTIM) or parameter is None:
                continue
            given = state_shard.shards.get(path)
            key, mark, kind = key.partition("#")
            if mark:
                assert given is not None, "numbers are whole on every rank"
                self.optimizer.state[parameter][key] = _NUMBERS[mark + kind](given.tensor.item())
            elif shape and shape == tuple(parameter.shape):
                if given is not None and given.tensor is self._placed.get(path):
                    local = given.tensor
                else:
                    local = _filled(parameter, given, dtype)
                self.optimizer.state[parameter][key] = placed_like(parameter, local)
            else:
                assert given is not None, "what has another shape is whole on every rank"
                self.optimizer.state[parameter][key] = beside(
                    parameter, given.tensor, self.optimizer
                )


def _as_piece(path: str, value: Any) -> tuple[str, Tensor] | None:
    """A value of an optimizer's state as a tensor, and the name under which it travels; None if it
    cannot travel."""
    if isinstance(value, Tensor):
        return path, value
    for mark, kind in _NUMBERS.items():
        if type(value) is kind:
            # Without loss: Python's floats have 64 bits.
            return path + mark, torch.tensor(value, dtype=torch.float64 if kind is float else None)
    return None


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _cannot_hand_over(optimizer: Optimizer, seen: str) -> UnsupportedOptimizer:
    return UnsupportedOptimizer(
        f"the state of {type(optimizer).__name__} cannot be handed to another member",
        seen=seen,
        expected="scalars, numbers, and tensors of the parameter's own shape",
        fix="Use an optimizer that treats each element separately, such as SGD or AdamW,"
        " or strategy 'ddp' or 'zero1', which leave parameters whole.",
    )


def _filled(parameter: nn.Parameter, given: TensorShard | None, dtype: torch.dtype) -> Tensor:
    """What this rank has of state of the parameter's layout: the shard (None: it holds nothing)."""
    local = torch.empty_like(local_part(parameter), dtype=dtype)
    return local if given is None else local.copy_(given.tensor)


def _check(name: str, own: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(own.shape) != shape:
        raise ShapeMismatch(
            f"the state does not fit the model at {name}",
            seen=str(shape),
            expected=str(tuple(own.shape)),
        )
    if own.dtype != dtype:
        raise DtypeMismatch(
            f"the state does not fit the model at {name}", seen=str(dtype), expected=str(own.dtype)
        )
