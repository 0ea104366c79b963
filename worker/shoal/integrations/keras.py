"""Keras 3 on the torch backend, in three ways.

`distribute` keeps `model.fit` and Keras's own optimizers, on a fixed set of ranks. `KerasModule`
makes a torch module of a Keras model, for your own loop in a session or with `shoal.distribute`.
`shoal.integrations.keras_session` runs `fit` in a session.
"""

import copy
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset

from shoal.backends.choice import init_static_world
from shoal.data.order import range_of_rank
from shoal.integrations.keras_sharded import shard_optimizer
from shoal.integrations.keras_tensor import LayerSplits, split_layers, track_values, whole_value
from shoal.layouts.tensor.parts import local
from shoal.torch_private.modules import child_table, parameter_table
from shoal_proto.errors import InvalidSpec, UnknownStrategy


class KerasModule(nn.Module):
    """A built Keras model as a torch module, with the model's own weights as its parameters.

    Trainable weights are parameters, all others (moving averages, seeds) are buffers, named by
    their Keras paths with "." for "/". Copies of the module share the Keras layers, but have their
    own weights. Every strategy without a pipeline accepts the module; "tensor" splits its Dense and
    Embedding layers. Losses that Keras layers add are not in the output.

    Under strategies that train copies, the Keras model keeps its old weights until `give_back`.
    Raises InvalidSpec for a model that is not built, or if Keras computes with another backend.
    """

    keras_model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        _check_backend()
        if not model.built:
            raise InvalidSpec(
                "the Keras model has no weights yet",
                seen="a model that is not built",
                expected="a built model",
                fix="Give the model its input shape, or call it once.",
            )
        self.__dict__["keras_model"] = model
        for variable in model.trainable_variables:
            self._keep(variable, trainable=True)
        for variable in model.non_trainable_variables:
            self._keep(variable, trainable=False)

    def _keep(self, variable: Any, *, trainable: bool) -> None:
        owner: nn.Module = self
        *path, name = variable.path.split("/")
        for step in path:
            if step not in child_table(owner):
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if trainable:
            owner.register_parameter(name, variable.value)
        else:
            owner.register_buffer(name, variable.value.detach())

    def _values(self, variables: Sequence[Any]) -> Iterator[Tensor]:
        for variable in variables:
            owner, name = self._owner_of(variable)
            yield local(getattr(owner, name))

    def _owner_of(self, variable: Any) -> tuple[nn.Module, str]:
        *path, name = variable.path.split("/")
        return self.get_submodule(".".join(path)), name

    def split_over(self, mesh: DeviceMesh) -> None:
        """See `shoal.layouts.tensor.layout.SelfSplittingModule`."""
        for variable, dim in _splits_of(self.keras_model).split_variables(mesh.get_group()):
            owner, name = self._owner_of(variable)
            whole = parameter_table(owner)[name]
            assert whole is not None, "only trained weights are split"
            cut = distribute_tensor(whole.detach(), mesh, [Shard(dim)], src_data_rank=None)
            parameter_table(owner)[name] = nn.Parameter(cut, requires_grad=whole.requires_grad)

    def forget_weights(self) -> None:
        """Free the memory of the Keras model's trainable weights, until `give_back`."""
        for variable in self.keras_model.trainable_variables:
            empty = torch.empty_like(variable.value, device="meta")
            variable._value = nn.Parameter(empty, requires_grad=variable.trainable)
        track_values(self.keras_model)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the Keras model, in the mode of `train()` or `eval()`."""
        model = self.keras_model
        kept = list(self._values(model.non_trainable_variables))
        outputs, updated = model.stateless_call(
            list(self._values(model.trainable_variables)),
            [value.clone() for value in kept],
            *inputs,
            training=self.training,
            **named,
        )
        with torch.no_grad():
            for value, new in zip(kept, updated, strict=True):
                value.copy_(new)
        return outputs

    @torch.no_grad()
    def give_back(self, state: Mapping[str, Tensor]) -> None:
        """Write `state`, a whole state_dict of this module, into the Keras model."""
        _splits_of(self.keras_model).undo()
        for variable in self.keras_model.variables:
            given = state.get(variable.path.replace("/", "."))
            if given is None:
                continue
            if variable.value.is_meta:
                variable._value = nn.Parameter(given.clone(), requires_grad=variable.trainable)
            else:
                variable.value.copy_(given)
        track_values(self.keras_model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KerasModule":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for key, value in self.__dict__.items():
            copied.__dict__[key] = value if key == "keras_model" else copy.deepcopy(value, memo)
        return copied


def distribute(model: Any, strategy: Any = "zero2", *, backend: str | None = None) -> Any:
    """Make a compiled Keras model train over all ranks that torchrun or mpiexec started.

    `fit`, `train_on_batch` and loops that end in `model.optimizer.apply(...)` work as before. Every
    rank must call `distribute` with the same model before the first step, and gets rank 0's
    weights.

    "zero2": each rank takes a share of each batch (`GlobalBatches`), updates its part of every
    weight, and keeps the optimizer state of that part. "tensor": Dense and Embedding layers are
    split; all ranks must take the same samples.

    Raises UnknownStrategy for another strategy. Raises InvalidSpec if Keras does not compute with
    torch, if the model is not built and compiled or its optimizer is built already, and under
    "tensor" if no layer can be split. Raises UnsupportedOptimizer for an optimizer that is not
    elementwise or, under "tensor", clips by norm. Raises what `init_static_world` raises.
    """
    _check_backend()
    refuse_unbuilt(model)
    if strategy not in ("zero2", "tensor"):
        raise UnknownStrategy(
            "no such strategy for fit()",
            seen=repr(strategy),
            expected="'zero2' or 'tensor'",
            fix="With any other strategy, train a KerasModule in a loop of your own.",
        )
    if model.optimizer.built:
        raise InvalidSpec(
            "the optimizer has state already",
            seen=f"{int(model.optimizer.iterations)} steps",
            expected="an optimizer that has taken no step",
            fix="Distribute the model between compile() and the first step.",
        )
    if strategy == "zero2":
        refuse_other_means(model)
    init_static_world(backend)
    for variable in model.variables:
        dist.broadcast(variable.value.detach(), src=0)
    if strategy == "tensor":
        split_layers(model, model.optimizer)
    else:
        shard_optimizer(model.optimizer)
        _weight_by_samples(model)
    return model


def whole_weights(model: Any) -> Mapping[str, Tensor]:
    """Return all weights of a distributed model by path, whole. Collective."""
    return {variable.path: whole_value(variable).detach().clone() for variable in model.variables}


class GlobalBatches(DataLoader[Any]):
    """Loader of this rank's share of each batch, for `fit` under "zero2".

    Only seed and epoch decide the order, so one process has the same global batches. Raises
    InvalidSpec if a batch has fewer samples than there are ranks.
    """

    def __init__(
        self, x: Any, y: Any, *, global_batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        fewest = min(len(x) % global_batch_size or global_batch_size, global_batch_size)
        if fewest < dist.get_world_size():
            raise InvalidSpec(
                "a batch has fewer samples than there are ranks",
                seen=f"{fewest} samples in one batch, {dist.get_world_size()} ranks",
                expected="a sample for every rank",
                fix="Choose another global_batch_size.",
            )
        shares = _Shares(len(x), global_batch_size, seed if shuffle else None)
        pairs = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
        super().__init__(pairs, batch_sampler=shares)


class _Shares(Sampler[list[int]]):
    def __init__(self, num_samples: int, batch_size: int, seed: int | None) -> None:
        self._num_samples, self._batch_size, self._seed = num_samples, batch_size, seed
        self._epoch = 0

    def __len__(self) -> int:
        return math.ceil(self._num_samples / self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._num_samples)
        if self._seed is not None:
            drawn = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
            order = torch.randperm(self._num_samples, generator=drawn)
        for start in range(0, self._num_samples, self._batch_size):
            stop = min(self._num_samples, start + self._batch_size)
            own = range_of_rank(start, stop, dist.get_rank(), dist.get_world_size())
            yield order[slice(*own)].tolist()
        # Count the epoch at its end: Keras also reads one batch of an iteration before it trains.
        self._epoch += 1


def _weight_by_samples(model: Any) -> None:
    """Make `train_step` weight each rank's gradients by its samples, and average non-trainable
    values, such as moving averages."""
    plain_step, plain_loss = model.train_step, model._compute_loss

    def compute_loss(_: Any, *given: Any, **named: Any) -> Any:
        if named.get("training"):
            refuse_masks(named["y_pred"])
        return plain_loss(*given, **named)

    def train_step(self: Any, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.optimizer.num_samples = keras.tree.flatten(x)[0].shape[0]
        logs = plain_step(data)
        tracked = [v.value for v in self.non_trainable_variables if v.value.is_floating_point()]
        for value in tracked:
            dist.all_reduce(value.detach())
            value.detach().div_(dist.get_world_size())
        return logs

    model.train_step = types.MethodType(train_step, model)
    model._compute_loss = types.MethodType(compute_loss, model)


def _splits_of(model: Any) -> LayerSplits:
    """Return a Keras model's only LayerSplits."""
    splits: LayerSplits = model.__dict__.setdefault("shoal_splits", LayerSplits(model))
    return splits


def refuse_unbuilt(model: Any) -> None:
    """Raise InvalidSpec unless the model is built and compiled with an optimizer."""
    compiled = model.compiled and model.optimizer is not None
    if not model.built or not compiled:
        raise InvalidSpec(
            "the Keras model cannot be distributed yet",
            seen=f"built={model.built} compiled={compiled}",
            expected="a model that is built and compiled with an optimizer",
        )


def refuse_other_means(model: Any) -> None:
    """Raise InvalidSpec for a loss that is not a mean over samples, which weigh members' losses."""
    reductions = {getattr(each, "reduction", "mean") for each in keras.tree.flatten(model.loss)}
    if others := reductions - {"mean", "sum_over_batch_size"}:
        raise _not_over_samples(f"reduction={sorted(map(str, others))[0]!r}")


def refuse_masks(outputs: Any) -> None:
    """Raise InvalidSpec for masked outputs: Keras's loss is a mean over the items not masked."""
    if any(getattr(each, "_keras_mask", None) is not None for each in keras.tree.flatten(outputs)):
        raise _not_over_samples("outputs with a mask, as of Masking or Embedding(mask_zero=True)")


def _not_over_samples(seen: str) -> InvalidSpec:
    return InvalidSpec(
        "the model's loss is not a mean over samples, so members' losses cannot be combined",
        seen=seen,
        expected="outputs without a mask, and losses with reduction='sum_over_batch_size'",
        fix="Train a KerasModule in a loop of your own, with session.backward(loss, weight=...).",
    )


def _check_backend() -> None:
    if keras.backend.backend() != "torch":
        raise InvalidSpec(
            "Keras computes with another backend",
            seen=keras.backend.backend(),
            expected="torch",
            fix="Set KERAS_BACKEND=torch before Keras is imported.",
        )
