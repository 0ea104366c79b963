"""Binding of a user's model and optimizer to the layout of one generation; reads and fills state.
The optimizer object stays the same; its parameters are replaced."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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
from shoal.model.script_hooks import shared_with_copies
from shoal.model.tied_tensors import persistent_buffers, refuse_hidden_ties, tied
from shoal.state.optimizer_state import (
    INNER,
    SLOTS,
    InspectedObjects,
    Slots,
    cannot_carry,
    contents_of,
    is_mark,
    mark_of,
    merged,
    put_settings,
    put_slots,
    refuse_other_owners,
    take_settings,
    take_slots,
)
from shoal.state.replicated import check_no_more, missing, names_in, place_state, refuse_tensors
from shoal.state.resharding import whole_model
from shoal.state.shards import MODEL, OPTIM, Chunk, Json, StateShard, TensorShard
from shoal.torch_private.dtensor import local_of
from shoal.torch_private.modules import parameter_table
from shoal_proto.errors import (
    DtypeMismatch,
    InvalidSpec,
    ShapeMismatch,
    UnsupportedOptimizer,
)


class MetaModel:
    """A model and the groups of its parameters in the optimizer.

    Raises UnsupportedOptimizer if `take_state` does, and InvalidSpec if

    - there is nothing to train, or a tensor of the model cannot be sent to a member;
    - the optimizer has a parameter that is not the model's;
    - different parameters share memory;
    - a module on the meta device cannot initialise itself.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
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
        for index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter not in names:
                    raise InvalidSpec(
                        "the optimizer holds a parameter that is not the model's",
                        seen=f"parameter {position} of group {index}: {tuple(parameter.shape)}",
                        expected="parameters of the model that is distributed with it",
                        fix="Distribute one module that holds all these parameters.",
                    )
            self.groups.append([names[parameter] for parameter in group["params"]])
        self.tied = tied(model)
        held = {**dict(model.named_parameters()), **persistent_buffers(model)}
        refuse_tensors(held)
        self.without_elements = {
            name: torch.empty_like(tensor, device="cpu")
            for name, tensor in held.items()
            if not tensor.numel()
        }
        self.order = tuple(model.state_dict(keep_vars=True))
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._given: dict[str, Slots] = {}
        self.take_state(optimizer)

    def take_state(self, optimizer: Optimizer) -> None:
        """Keep the state that the script loaded into the optimizer. Does nothing after
        `forget_weights`. Raises UnsupportedOptimizer for values that the state of a job cannot
        hold."""
        for parameter in self.model.parameters():
            name, state = self._names.get(id(parameter)), optimizer.state.get(parameter)
            if name is None or not state or any(map(_is_meta, state.values())):
                continue
            self._given[name] = take_slots(state, name, optimizer)

    def copy(self) -> nn.Module:
        """Copy the model: parameters on the meta device, buffers real, the same hooks. Raises
        InvalidSpec if `copy.deepcopy` fails."""
        try:
            memo = shared_with_copies(self.model) | self._empty_parameters()
            copied: nn.Module = copy.deepcopy(self.model, memo)
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
        """Return the state of step 0: the script's weights and optimizer state. A model made on the
        meta device is initialised with the script's seed."""
        model = initialised_copy(self.model, self._seed) if self._made_on_meta else self.model
        state = {**dict(model.named_parameters()), **persistent_buffers(model)}
        shards = {
            MODEL + name: TensorShard.whole(tensor.detach()) for name, tensor in state.items()
        }
        for name, given in self._given.items():
            for key, tensor in given.tensors.items():
                shards[f"{OPTIM}{name}/{key}"] = TensorShard.whole(tensor.detach())
        values: dict[str, Json] = {
            name: dict(given.values) for name, given in self._given.items() if given.values
        }
        shards |= dict(map(mark_of, values))
        return StateShard(step=0, shards=shards, values={SLOTS: values} if values else {})

    def forget_weights(self) -> None:
        """Free the user's own parameters and the optimizer's state for them. Tied parameters stay
        tied."""
        if not all(parameter.is_meta for parameter in self.model.parameters()):
            empty = self._empty_parameters()
            for part in self.model.modules():
                for name, parameter in parameter_table(part).items():
                    if parameter is not None and not parameter.is_meta:
                        parameter_table(part)[name] = mark_taken(empty[id(parameter)])
        self._given.clear()
        self._names.clear()

    def give_back(self, optimizer: Optimizer) -> None:
        """Give the optimizer the user's own parameters back, with the kept state. Does nothing
        after `forget_weights`."""
        if not self._names:
            return
        own = dict(self.model.named_parameters())
        for names, group in zip(self.groups, optimizer.param_groups, strict=True):
            group["params"] = [own[name] for name in names]
        optimizer.state.clear()
        for name, given in self._given.items():
            optimizer.state[own[name]] = put_slots(given)

    def _empty_parameters(self) -> dict[int, Any]:
        return {
            id(parameter): nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            for parameter in self.model.parameters()
        }


class OptimizerBinding:
    """Optimizer bound to a layout's parameters; reads and fills the state of both by name."""

    def __init__(self, meta_model: MetaModel, optimizer: Optimizer, layout: Layout) -> None:
        self.layout = layout
        self.optimizer = optimizer
        self._parameters = dict(layout.parameters)
        self.held = dict(layout.held)
        self.held_parameters = {n: t for n, t in self.held.items() if isinstance(t, nn.Parameter)}
        self._known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._placed: dict[str, Tensor] = {}
        self._outlines: dict[str, tuple[torch.Size, torch.dtype]] = {}
        """Shape and dtype of each tensor of the optimizer's state when `collect` first read it."""
        self._objects = InspectedObjects()
        self._shards: Mapping[str, TensorShard] = {}
        """Shards that `collect` returned last; never changed, only replaced."""
        self._sources: Sequence[Tensor] = ()
        self._slots: Mapping[str, Json] = {}
        self.group_names = meta_model.groups
        self._tied = meta_model.tied
        self._model_names = names_in(meta_model.model)
        self.without_elements = meta_model.without_elements
        self.order = meta_model.order
        meta_model.take_state(optimizer)
        optimizer.state.clear()
        for group, names in zip(optimizer.param_groups, meta_model.groups, strict=True):
            group["params"] = [self._parameters[name] for name in names if name in self._parameters]
        self.gradients = StepGradients(self._parameters.values(), optimizer)

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Drop this rank's gradients of parameters that other ranks step by this optimizer."""
        own = {id(group) for group in optimizer.param_groups}
        for names, group in zip(self.group_names, self.optimizer.param_groups, strict=True):
            for name in names if id(group) in own else ():
                if name not in self._parameters and name in self.held_parameters:
                    self.held_parameters[name].grad = None

    # --- reading ---

    def collect(self, step: int) -> StateShard:
        """Return the state that this rank holds, not copied: valid until the next step. Raises
        UnsupportedOptimizer for state that cannot be sent to another member."""
        contents = contents_of([self.optimizer])
        if not self._objects.has(contents) or not all(
            map(_shows, self._shards.values(), self._sources)
        ):
            self._find()
            self._objects.keep(contents)
        values = {**self._values(), **({SLOTS: dict(self._slots)} if self._slots else {})}
        return StateShard(step=step, shards=self._shards, values=values)

    def _find(self) -> None:
        """Find the shards and plain values: valid while the state has the same objects in the same
        memory."""
        refuse_other_owners(self.optimizer, self._parameters.values())
        tensors = {MODEL + name: tensor for name, tensor in self.held.items()}
        shards = {MODEL + name: self.layout.shard(name, t) for name, t in self.held.items()}
        slots: dict[str, Json] = {}
        for name, parameter in self._parameters.items():
            own = take_slots(self.optimizer.state.get(parameter, {}), name, self.optimizer)
            for key, value in own.tensors.items():
                path = f"{OPTIM}{name}/{key}"
                tensors[path], shards[path] = value, self._shard_of_state(name, key, value)
            if own.values:
                slots[name] = dict(own.values)
        for path, mark in map(mark_of, slots):
            tensors[path], shards[path] = mark.tensor, mark
        self._slots = slots
        self._shards = {path: each for path, each in shards.items() if each.chunk.num_elements}
        self._sources = [tensors[path] for path in self._shards]

    def _shard_of_state(self, name: str, key: str, value: Tensor) -> TensorShard:
        own = (value.shape, value.dtype)
        first = self._outlines.setdefault(f"{name}/{key}", own)
        if own != first:
            # Copies of later states reuse the memory of the first copy.
            raise cannot_carry(
                self.optimizer,
                f"state {key.removeprefix(INNER)!r} of {name}: {tuple(own[0])} of {own[1]}",
                f"{tuple(first[0])} of {first[1]}, as after earlier steps: only strategy"
                " 'ddp' allows state that changes its shape or dtype",
            )
        if value.ndim == 0:
            return TensorShard.whole(local_part(value))
        parameter = self._parameters[name]
        if value.shape == parameter.shape:
            return self.layout.shard(name, value)
        whole = self.layout.shard(name, parameter)
        if whole.chunk.sizes != whole.shape:
            raise _cannot_cut(self.optimizer, f"{name}/{key}", value.shape, whole.shape)
        return TensorShard.whole(local_part(value))

    def model(self, step: int) -> StateShard:
        """Return this rank's part of the model; buffers only on the rank that writes them into
        checkpoints."""
        given = {
            MODEL + name: self.layout.shard(name, tensor)
            for name, tensor in self.held.items()
            if isinstance(tensor, nn.Parameter) or self.layout.is_counted_here(name)
        }
        kept = {path: shard for path, shard in given.items() if shard.chunk.num_elements}
        return StateShard(step=step, shards=kept, values={"tied": dict(self._tied)})

    def whole_model(self, step: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Gather the model in the order of its state_dict. Collective; raises what `reshard`
        raises."""
        return whole_model(group, self.model(step), self.without_elements, self.order)

    def _values(self) -> dict[str, Json]:
        kinds = kinds_of(self.optimizer)
        return {"groups": self._settings(), KINDS: [*kinds], "tied": dict(self._tied)}

    def _settings(self) -> list[Json]:
        settings = take_settings(self.optimizer)
        pairs = zip(self.group_names, settings, strict=True)
        return [{"params": list[Json](names), **own} for names, own in pairs]

    @property
    def known(self) -> frozenset[str]:
        """Names of all tensors of the state from which this rank was filled."""
        return frozenset(self._known)

    @property
    def collected_names(self) -> frozenset[str]:
        """Names of all tensors of optimizer state that `collect` has returned so far."""
        return frozenset(OPTIM + each for each in self._outlines)

    def writes(self, name: str) -> bool:
        """True if this rank writes its shard of this name into a checkpoint."""
        if name.startswith(MODEL):
            return self.layout.is_counted_here(name.removeprefix(MODEL))
        return self.layout.is_counted_here(name.removeprefix(OPTIM).rpartition("/")[0])

    # --- filling ---

    def target_of(self, name: str, chunk: Chunk) -> Tensor | None:
        """Return memory into which a chunk from `needed_chunk` can be received, so that `fill` need
        not copy it. None for a scalar, for a shape other than the parameter's, for a chunk other
        than this rank's whole part, and for a part that is not on the host."""
        shape, dtype = self._known[name]
        if name.startswith(MODEL):
            key = name.removeprefix(MODEL)
            own = self.layout.shard(key, self.held[key])
        else:
            key = name.removeprefix(OPTIM).rpartition("/")[0]
            own = self.layout.shard(key, self._parameters[key])
        # The optimizer decides on which device a scalar lies: see `place_state`.
        if not shape or own.shape != shape or own.chunk != chunk or own.tensor.device.type != "cpu":
            return None
        is_model = name.startswith(MODEL)
        target = own.tensor if is_model else torch.empty_like(own.tensor, dtype=dtype)
        self._placed[name] = target
        return target

    def needed_chunk(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Chunk | None:
        """Return the chunk that this rank needs of a tensor of a state; None if it needs none.
        Raises ShapeMismatch or DtypeMismatch if the state belongs to another model, and
        UnsupportedOptimizer if optimizer state cannot be cut as its parameter is."""
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
            raise _cannot_cut(self.optimizer, name.removeprefix(OPTIM), shape, whole)
        return Chunk.whole(shape)

    @torch.no_grad()
    def fill(self, state_shard: StateShard) -> None:
        """Fill the layout and the optimizer from a state, after `needed_chunk` for each of its
        names. Raises ShapeMismatch for another model's state, and InvalidSpec for another
        optimizer's."""
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
        put_settings(self.optimizer, state_shard.values)

    def _fill_optimizer(self, state_shard: StateShard) -> None:
        values: Any = merged([state_shard.values])
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in values}
        for path in self._known:
            name, _, key = path.removeprefix(OPTIM).rpartition("/")
            if path.startswith(OPTIM) and name in self._parameters and not is_mark(path):
                tensors.setdefault(name, {})[key] = self._tensor_of_state(path, name, state_shard)
        self.optimizer.state.clear()
        for name, own in tensors.items():
            if name in self._parameters:
                slots = Slots(tensors=own, values=values.get(name, {}))
                self.optimizer.state[self._parameters[name]] = put_slots(slots)

    def _tensor_of_state(self, path: str, name: str, state_shard: StateShard) -> Tensor:
        (shape, dtype), parameter = self._known[path], self._parameters[name]
        given = state_shard.shards.get(path)
        if shape and shape == tuple(parameter.shape):
            is_placed = given is not None and given.tensor is self._placed.get(path)
            local = given.tensor if given and is_placed else _filled(parameter, given, dtype)
            return placed_like(parameter, local)
        assert given is not None, "state of another shape is whole on every rank"
        return place_state(parameter, path.rpartition("/")[2], given.tensor, self.optimizer)


def _shows(shard: TensorShard, tensor: Tensor) -> bool:
    part = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return shard.tensor.is_set_to(part) and shard.tensor.dtype == part.dtype


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _cannot_cut(
    optimizer: Optimizer, path: str, shape: Sequence[int], whole: Sequence[int]
) -> UnsupportedOptimizer:
    parameter, _, key = path.rpartition("/")
    return UnsupportedOptimizer(
        f"the state of {type(optimizer).__name__} cannot be cut as its parameters are",
        seen=f"state {key!r} of {parameter}: shape {tuple(shape)} for a parameter of"
        f" {tuple(whole)} that is cut",
        expected="scalars, plain values, and tensors of the parameter's own shape",
        fix="Use an optimizer that treats each element separately, such as SGD or AdamW,"
        " or strategy 'ddp' or 'zero1', which leave parameters whole.",
    )


def _filled(parameter: nn.Parameter, given: TensorShard | None, dtype: torch.dtype) -> Tensor:
    """Copy this rank's part of a state tensor to memory with the parameter's strides. `given`: None
    for a part without elements."""
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
