"""Splits the Dense and Embedding layers of a Keras model over ranks that take the same samples."""

from itertools import pairwise
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.integrations.keras_sharded import check_elementwise
from shoal.layouts.tensor_parts import Cut, enter, gathered, summed
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer

_ELEMENTWISE = frozenset(
    {"elu", "gelu", "leaky_relu", "linear", "mish", "relu", "relu6", "selu", "sigmoid", "silu"}
    | {"softplus", "softsign", "tanh"}
)


class _ColumnDense:
    """Each rank computes some of the units."""

    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        outputs = enter(inputs, self.shoal_cut) @ self._kernel.value
        if self.bias is not None:
            outputs = outputs + self.bias.value
        if not self.shoal_paired:
            outputs = gathered(outputs, self.shoal_cut)
        return outputs if self.activation is None else self.activation(outputs)


class _RowDense:
    """Each rank computes its summand of all units, from the units of the layer before."""

    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        outputs = summed(inputs @ self._kernel.value, self.shoal_cut)
        if self.bias is not None:
            outputs = outputs + self.bias.value
        return outputs if self.activation is None else self.activation(outputs)


class _ColumnEmbedding:
    """Each rank looks up some of the columns."""

    def call(self: Any, inputs: Any) -> Any:
        part = nn.functional.embedding(inputs.long(), self._embeddings.value)
        return gathered(part, self.shoal_cut)


def split_layers(model: Any, optimizer: Any) -> None:
    """Split the model in place. Its optimizer, which must have no state yet, stays what it is.

    Dense layers that follow each other in a Sequential, with an elementwise activation between
    them, become columns and a row; every other one is split by units, which are gathered.
    Raises UnsupportedOptimizer for one that works on norms, InvalidSpec if nothing can be split.
    """
    check_elementwise(optimizer)
    if optimizer.clipnorm or optimizer.global_clipnorm:
        raise UnsupportedOptimizer(
            "norms of split weights are not those of whole ones",
            seen="clipnorm or global_clipnorm",
            expected="clipvalue or no clipping",
            fix="Use strategy 'zero2', which clips by norms over all ranks.",
        )
    rows = _rows_of_pairs(model)
    splits = [_split(layer, rows) for layer in model._flatten_layers()]
    if not any(splits):
        raise InvalidSpec(
            "nothing of the Keras model can be split",
            seen=", ".join(sorted({type(layer).__name__ for layer in model._flatten_layers()})),
            expected=f"plain Dense or Embedding layers of at least {dist.get_world_size()} units",
        )
    for layer in model._flatten_layers():
        if hasattr(layer, "_torch_params"):
            layer._track_variables()


def whole_value(variable: Any) -> Tensor:
    """The whole of a weight, which may be split. Called by all ranks."""
    dim = getattr(variable, "shoal_dim", None)
    value: Tensor = variable.value
    if dim is None:
        return value
    return gathered(value.movedim(dim, -1), variable.shoal_cut).movedim(-1, dim)


def _rows_of_pairs(model: Any) -> dict[int, int]:
    """For the first layer of each pair (by id) the id of the second."""
    pairs: dict[int, int] = {}
    for part in model._flatten_layers():
        layers = part.layers if type(part) is keras.Sequential else []
        for first, second in pairwise(layers):
            free = _is_plain(first) and _is_plain(second) and id(first) not in pairs.values()
            if free and _activation(first) in _ELEMENTWISE and _fits(first.units):
                pairs[id(first)] = id(second)
    return pairs


def _split(layer: Any, pairs: dict[int, int]) -> bool:
    """Split one layer if that can be done; whether it was."""
    if type(layer) is keras.layers.Embedding and layer.lora_rank is None:
        if not _fits(layer.output_dim) or layer.embeddings_constraint is not None:
            return False
        _become(layer, _ColumnEmbedding, layer.output_dim)
        _keep_part(layer._embeddings, 1, layer.shoal_cut)
        return True
    if not _is_plain(layer):
        return False
    if id(layer) in pairs.values():
        _become(layer, _RowDense, layer._kernel.shape[0])
        layer.input_spec = None  # it asks for the whole width
        _keep_part(layer._kernel, 0, layer.shoal_cut)
    elif _fits(layer.units):
        _become(layer, _ColumnDense, layer.units)
        layer.shoal_paired = id(layer) in pairs
        _keep_part(layer._kernel, 1, layer.shoal_cut)
        if layer.bias is not None:
            _keep_part(layer.bias, 0, layer.shoal_cut)
    else:
        return False
    return True


def _is_plain(layer: Any) -> bool:
    """A Dense layer of which nothing needs the whole kernel but its product."""
    return (
        type(layer) is keras.layers.Dense
        and layer.lora_rank is None
        and layer.quantization_mode is None
        and not any(
            (
                layer.kernel_regularizer,
                layer.bias_regularizer,
                layer.activity_regularizer,
                layer.kernel_constraint,
                layer.bias_constraint,
            )
        )
    )


def _activation(layer: Any) -> str:
    return getattr(layer.activation, "__name__", "") if layer.activation else "linear"


def _fits(size: int) -> bool:
    return size >= dist.get_world_size()


def _become(layer: Any, part: type, size: int) -> None:
    own = type(layer)
    group = dist.group.WORLD
    assert group is not None, "init_static_world made it"
    layer.__class__ = type(own.__name__, (part, own), {"__module__": own.__module__})
    layer.__dict__["shoal_cut"] = Cut.of(size, group)


def _keep_part(variable: Any, dim: int, cut: Cut) -> None:
    """Let the variable be this rank's part of what it was."""
    part = cut.own(variable.value.detach(), dim).clone(memory_format=torch.contiguous_format)
    variable._value = nn.Parameter(part, requires_grad=variable.trainable)
    variable._shape = tuple(part.shape)
    variable.shoal_dim, variable.shoal_cut = dim, cut


__all__ = ["split_layers", "whole_value"]
