"""Splits Dense and Embedding layers of a Keras model over ranks that take the same samples."""

from collections import Counter
from itertools import pairwise
from typing import Any

import keras
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.integrations.keras_sharded import check_elementwise
from shoal.layouts.tensor.layer_group import TensorGroup
from shoal.layouts.tensor.parts import Cut, enter, gathered, summed
from shoal_proto.errors import InvalidSpec, UnsupportedOptimizer

_ELEMENTWISE = frozenset(
    {"elu", "gelu", "leaky_relu", "linear", "mish", "relu", "relu6", "selu", "sigmoid", "silu"}
    | {"softplus", "softsign", "tanh"}
)


class _ColumnDense:
    """Dense layer of which each rank computes some units."""

    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        outputs = enter(inputs, self.shoal_cut) @ self._kernel.value
        if self.bias is not None:
            outputs = outputs + self.bias.value
        if not self.shoal_paired:
            outputs = gathered(outputs, self.shoal_cut)
        return outputs if self.activation is None else self.activation(outputs)


class _RowDense:
    """Dense layer of which each rank computes a partial sum, from its units of the previous
    layer."""

    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        outputs = summed(inputs @ self._kernel.value, self.shoal_cut)
        if self.bias is not None:
            outputs = outputs + self.bias.value
        return outputs if self.activation is None else self.activation(outputs)


class _ColumnEmbedding:
    """Embedding of which each rank looks up some columns."""

    def call(self: Any, inputs: Any) -> Any:
        part = nn.functional.embedding(inputs.long(), self._embeddings.value)
        return gathered(part, self.shoal_cut)


def split_layers(model: Any, optimizer: Any) -> None:
    """Split the model's layers in place. The optimizer must have no state.

    Of two consecutive plain Dense layers of a Sequential, with an elementwise activation between
    them, the first is split by columns and the second by rows, unless one of them is also used
    elsewhere. Other plain Dense layers and Embeddings with enough units are split by units, and
    their outputs gathered. Raises UnsupportedOptimizer for an optimizer that is not elementwise or
    clips by norm, and InvalidSpec if no layer can be split.
    """
    check_elementwise(optimizer)
    if optimizer.clipnorm or optimizer.global_clipnorm:
        raise UnsupportedOptimizer(
            "norms of split weights differ from those of whole weights",
            seen="clipnorm or global_clipnorm",
            expected="clipvalue or no clipping",
            fix="Use strategy 'zero2', which clips by norms over all ranks.",
        )
    group = dist.group.WORLD
    assert group is not None, "init_static_world made it"
    splits = _splits_of(model, group)
    if not splits:
        raise InvalidSpec(
            "no layer of the Keras model can be split",
            seen=", ".join(sorted({type(layer).__name__ for layer in model._flatten_layers()})),
            expected=f"plain Dense or Embedding layers of at least {group.size()} units",
        )
    for split in splits:
        split.begin(group)
        for variable, dim in split.cuts:
            _keep_part(variable, dim, split.layer.shoal_cut)
    track_values(model)


def track_values(model: Any) -> None:
    """Register the variables' current tensors with the layers as torch modules."""
    for layer in model._flatten_layers():
        if hasattr(layer, "_torch_params"):
            layer._track_variables()


class LayerSplits:
    """Splits of a Keras model's layers, made again in each generation.

    Between `split_variables` and `undo` layers compute with parts, which the caller passes to each
    call.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._active: list[_Split] = []
        self._shapes: list[tuple[Any, tuple[int, ...]]] = []

    def split_variables(self, group: dist.ProcessGroup) -> list[tuple[Any, int]]:
        """Split over this group. Returns the variables, each with the dimension of its split."""
        self.undo()
        if group.size() == 1:
            return []
        self._active = _splits_of(self._model, group)
        cuts = []
        for split in self._active:
            split.begin(group)
            for variable, dim in split.cuts:
                shape = list(variable.shape)
                self._shapes.append((variable, tuple(shape)))
                shape[dim] = split.layer.shoal_cut.size
                variable._shape = tuple(shape)
                cuts.append((variable, dim))
        return cuts

    def undo(self) -> None:
        """Let the layers compute with whole values."""
        for split in self._active:
            split.end()
        for variable, shape in self._shapes:
            variable._shape = shape
        self._active, self._shapes = [], []


def whole_value(variable: Any) -> Tensor:
    """Return the whole value of a weight. Collective."""
    dim = getattr(variable, "shoal_dim", None)
    value: Tensor = variable.value
    if dim is None:
        return value
    return gathered(value.movedim(dim, -1), variable.shoal_cut).movedim(-1, dim)


class _Split:
    def __init__(self, layer: Any, part: type, size: int, *, paired: bool = False) -> None:
        self.layer = layer
        self._part, self._size, self._paired = part, size, paired
        self._before = type(layer), layer.input_spec
        self.cuts: list[tuple[Any, int]] = []
        """Variables, and the dimension along which each is cut."""

    def begin(self, group: dist.ProcessGroup) -> None:
        layer, plain = self.layer, type(self.layer)
        layer.__class__ = type(
            plain.__name__, (self._part, plain), {"__module__": plain.__module__}
        )
        ranks = TensorGroup(group, torch.device("cpu"))
        layer.__dict__["shoal_cut"] = Cut.of(self._size, ranks.of_layer(layer.name))
        layer.__dict__["shoal_paired"] = self._paired
        if self._part is _RowDense:
            layer.input_spec = None  # it would require the whole width

    def end(self) -> None:
        self.layer.__class__, self.layer.input_spec = self._before


def _splits_of(model: Any, group: dist.ProcessGroup) -> list[_Split]:
    ranks = group.size()
    pairs = _find_pairs(model, ranks)
    found = (_split_of(layer, pairs, ranks) for layer in model._flatten_layers())
    return [split for split in found if split is not None]


def _find_pairs(model: Any, ranks: int) -> dict[int, int]:
    pairs: dict[int, int] = {}
    owners = Counter(
        id(layer)
        for part in model._flatten_layers()
        for layer in part._flatten_layers(include_self=False, recursive=False)
    )
    for part in model._flatten_layers():
        layers = part.layers if type(part) is keras.Sequential else []
        for first, second in pairwise(layers):
            is_pair = owners[id(first)] == owners[id(second)] == 1
            free = _is_plain(first) and _is_plain(second) and id(first) not in pairs.values()
            if is_pair and free and _activation(first) in _ELEMENTWISE and first.units >= ranks:
                pairs[id(first)] = id(second)
    return pairs


def _split_of(layer: Any, pairs: dict[int, int], ranks: int) -> _Split | None:
    if type(layer) is keras.layers.Embedding and layer.lora_rank is None:
        if layer.output_dim < ranks or layer.embeddings_constraint is not None:
            return None
        split = _Split(layer, _ColumnEmbedding, layer.output_dim)
        split.cuts.append((layer._embeddings, 1))
        return split
    if not _is_plain(layer):
        return None
    if id(layer) in pairs.values():
        split = _Split(layer, _RowDense, layer._kernel.shape[0])
        split.cuts.append((layer._kernel, 0))
        return split
    if layer.units < ranks:
        return None
    split = _Split(layer, _ColumnDense, layer.units, paired=id(layer) in pairs)
    split.cuts.append((layer._kernel, 1))
    if layer.bias is not None:
        split.cuts.append((layer.bias, 0))
    return split


def _is_plain(layer: Any) -> bool:
    """True for a Dense layer without options that need the whole kernel."""
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


def _keep_part(variable: Any, dim: int, cut: Cut) -> None:
    part = cut.own(variable.value.detach(), dim).clone(memory_format=torch.contiguous_format)
    variable._value = nn.Parameter(part, requires_grad=variable.trainable)
    variable._shape = tuple(part.shape)
    variable.shoal_dim, variable.shoal_cut = dim, cut
