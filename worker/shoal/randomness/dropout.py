"""Dropout with masks that do not depend on membership.

Each element's random number is a hash of (seed, step, layer, call, the sample's position in the
global batch, the element in the sample), see `shoal.randomness`. Under torch.compile, an operator
gives the key and the samples: another step or generation needs no new compilation.

The dropout modules of torch.nn are covered; functions (`F.dropout`, attention's own) are not.
"""

import itertools
import weakref
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shoal.randomness import digest, mix, present
from shoal.step_context import PresentSamples
from shoal.torch_private.compiling import eager
from shoal.torch_private.recomputing import is_recomputing, same_again, watch_checkpointing
from shoal.torch_private.tensors import in_backward, node_in_progress, num_nodes
from shoal_proto.errors import InvalidSpec

T = TypeVar("T")

_WORD = 0xFFFFFFFF
_BLOCK_ELEMENTS = 1 << 19


def key_dropout(model: nn.Module) -> int:
    """Make the model's dropout modules draw by the position of samples; return their number.

    The modules stay the same objects; subclasses of torch's keep their own forward pass. Without
    samples, and in evaluation, they work as before. A module must have the same name in `model` on
    all ranks.

    Samples lie along the first dimension, or along the second in torch's transformer layers without
    `batch_first`; see `samples_along` for others.
    """
    watch_checkpointing()
    num_keyed = 0
    second: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            if not module.self_attn.batch_first:
                second.update(module.children())
        elif isinstance(module, _DROPOUTS):
            module.__dict__["_layer"] = _Layer(digest(name))
            if module in second:
                module.__dict__.setdefault("_samples_along", 1)
            module.__class__ = _KEYED.get(type(module), type(module))
            num_keyed += 1
    return num_keyed


def unkey_dropout(model: nn.Module) -> None:
    """Undo `key_dropout`."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS) and module.__dict__.pop("_layer", None) is not None:
            module.__class__ = _PLAIN.get(type(module), type(module))


def with_dropout_within(model: nn.Module) -> list[str]:
    """Return the names of torch's modules that apply dropout without a dropout module."""
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
        or (isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1)
    ]


def samples_along(dropout: nn.Module, dim: int | None) -> None:
    """Set the dimension of this module's inputs along which the samples lie, each with one or
    several consecutive rows. None, or a size that is not a multiple of the number of samples: all
    members use one mask in a step."""
    dropout.__dict__["_samples_along"] = dim


def draw(dropout: nn.Module, shape: torch.Size, device: torch.device, *, p: float) -> Tensor | None:
    """Draw a mask (bool) of this shape: an element is kept with probability 1 - p. Each call for
    the same samples has another mask.

    Returns None if the module is not keyed, or if no samples are set; a compiled graph then draws a
    key from torch's generator.
    """
    layer: _Layer | None = getattr(dropout, "_layer", None)
    if layer is None:
        return None
    dim: int | None = getattr(dropout, "_samples_along", 0)
    if torch.compiler.is_compiling():
        return _traced(layer.handle, dim, shape, device, p)
    return _drawn(layer, dim, shape, device, p=p)


@eager
def _drawn(
    layer: "_Layer", dim: int | None, shape: torch.Size, device: torch.device, *, p: float
) -> Tensor | None:
    drawn = layer.next_draw()
    if drawn is None:
        return None
    samples, key = drawn
    if dim is None or dim >= len(shape) or not samples.count or shape[dim] % samples.count:
        return _kept((1, shape.numel()), key, first=-1, p=p, device=device).view(shape)
    sizes = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
    rows = (samples.count, shape.numel() // samples.count)
    kept = _kept(rows, key, first=samples.first, p=p, device=device)
    return kept.view(sizes).movedim(0, dim)


class _CallsOfNode(Generic[T]):
    """Results of the calls made in the forward pass of the newest autograd node that runs its
    operators itself: a compiled graph, or a `torch.autograd.Function`."""

    def __init__(self) -> None:
        self._num_nodes = 0
        self._results: list[T] = []

    def add(self, result: T) -> None:
        if self._num_nodes != (num := num_nodes()):
            self._num_nodes, self._results = num, []
        self._results.append(result)

    def repeated(self) -> T:
        """Return the result of the call that the backward pass of the node in progress repeats.

        Raises InvalidSpec if it is unknown: backward may repeat some of several calls, in any
        order.
        """
        # Such a node is made just before its operators run, and they make no nodes.
        if self._num_nodes != node_in_progress() + 1 or len(self._results) != 1:
            raise _unknown_repetition()
        return self._results[0]


class _Layer:
    def __init__(self, key: int) -> None:
        self.key = key
        self._samples: PresentSamples | None = None
        self._num_calls = 0
        self._draws: _CallsOfNode[_Draw] = _CallsOfNode()
        self._numbers: _CallsOfNode[list[int]] = _CallsOfNode()
        """Results of `next_numbers`."""
        number = next(_numbers)
        _layers[number] = self
        self.handle = torch.tensor([number, 0], dtype=torch.int64, device="cpu")
        """Number of the layer in `_layers`, and the number of keys made. A tensor: a graph would be
        compiled again for each plain number."""

    def __getstate__(self) -> int:
        return self.key

    def __setstate__(self, key: int) -> None:
        # A copy is another layer with the same key.
        self.__init__(key)  # type: ignore[misc]

    def next_draw(self) -> "_Draw | None":
        """Return the samples and key of this call; in a backward pass, those of the forward call
        that it repeats. None without samples."""
        draw = same_again(self._next_draw)
        # torch disables gradients in the forward pass of an `autograd.Function`.
        if draw is not None and not torch.is_grad_enabled() and not _repeats_a_node():
            self._draws.add(draw)
        return draw

    def _next_draw(self) -> "_Draw | None":
        samples = present()
        if in_backward() and (samples or self._samples):
            if is_recomputing():
                # The recomputation makes more calls than the forward pass did.
                raise _unknown_repetition()
            return self._draws.repeated()
        if samples is None:
            return None
        # Compared by identity: a repeated step has equal samples, and counts from 0 again.
        if samples is not self._samples:
            self._samples, self._num_calls = samples, 0
        self._num_calls += 1
        return samples, mix(samples.seed, samples.step, self.key, self._num_calls - 1)

    def next_numbers(self) -> list[int]:
        """Return the numbers of `dropout_key` for this call; if a compiled graph recomputes its
        forward pass, those of the forward call."""
        if _repeats_a_node():
            return self._numbers.repeated()
        draw = self.next_draw()
        if draw is None:
            numbers = [*torch.randint(-(1 << 31), 1 << 31, (2,)).tolist(), 0, 0]
        else:
            samples, key = draw
            numbers = [_signed(key & _WORD), _signed(key >> 32), samples.first, samples.count]
        self._numbers.add(numbers)
        return numbers


def _repeats_a_node() -> bool:
    """True in a backward pass, unless torch's checkpointing recomputes a function."""
    return in_backward() and not is_recomputing()


_Draw = tuple[PresentSamples, int]
"""The samples of a call, and its key."""


def _unknown_repetition() -> InvalidSpec:
    return InvalidSpec(
        "a backward pass called a dropout module, and it is unknown which forward call it repeats",
        seen="a call that neither torch.utils.checkpoint nor the newest autograd.Function with this"
        " module repeats, or a module that one function or compiled graph calls several times",
        expected="activation checkpointing by torch.utils.checkpoint; within an autograd.Function"
        " or a compiled graph a dropout module of its own for each call, and the backward pass"
        " before the next forward pass",
        fix="With distribute(..., keyed_dropout=False), masks are drawn by torch.",
    )


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, _Layer] = weakref.WeakValueDictionary()


# Mutating and nondeterministic: a graph runs it once for each call, in order.
@torch.library.custom_op(
    "shoal::dropout_key", mutates_args=("layer",), tags=(torch.Tag.nondeterministic_seeded,)
)
def _key_of(layer: Tensor, device: torch.device) -> Tensor:
    """Return four numbers on the device: the two halves of the key, the first sample's position,
    and the number of samples. Without samples, the key is random and the last two are 0."""
    layer[1] += 1
    numbers = _layers[int(layer[0])].next_numbers()
    return torch.tensor(numbers, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


@_key_of.register_fake
def _(layer: Tensor, device: torch.device) -> Tensor:
    return torch.empty(4, dtype=torch.int32, device=device)


def _traced(
    layer: Tensor, dim: int | None, shape: torch.Size, device: torch.device, p: float
) -> Tensor:
    low, high, first, count = _key_of(layer, device).unbind()
    if p >= 1:
        return torch.zeros(shape, dtype=torch.bool, device=device)
    each = torch.arange(shape.numel(), dtype=torch.int32, device=device).view(shape)
    sample = torch.full((), -1, dtype=torch.int32, device=device)
    if dim is not None and dim < len(shape):
        others = shape.numel() // max(shape[dim], 1)
        along = torch.arange(shape[dim], dtype=torch.int32, device=device)
        rest = torch.arange(others, dtype=torch.int32, device=device)
        # Number of rows of each sample. Used only if the samples divide the rows evenly.
        size = shape[dim] // count.clamp(min=1)
        are_samples = (count > 0) & (size * count == shape[dim])
        size = size.clamp(min=1)
        sizes = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
        within = ((along % size) * others)[:, None] + rest
        each = torch.where(are_samples, within.view(sizes).movedim(0, dim), each)
        column = [1] * len(shape)
        column[dim] = shape[dim]
        sample = torch.where(are_samples, first + along // size, sample).view(column)
    samples = _hashed(_hashed(sample + low) ^ high)
    return _hashed(samples + _hashed(each)) >= round(p * 2**32) - 2**31


def _hashed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ ((numbers >> 16) & 0xFFFF)) * _signed(0x7FEB352D)
    return (numbers ^ ((numbers >> 15) & 0x1FFFF)) * _signed(0x846CA68B)


def _kept(rows: tuple[int, int], key: int, *, first: int, p: float, device: torch.device) -> Tensor:
    """Compute a mask: a row for each sample from position `first` on, a column for each element."""
    num_samples, num_elements = rows
    kept = torch.empty(rows, dtype=torch.bool, device=device)
    if p >= 1:
        return kept.zero_()
    low, high = _signed(key & _WORD), _signed(key >> 32)
    positions = torch.arange(first, first + num_samples, dtype=torch.int32, device=device)
    samples = _hash(_hash(positions + low) ^ high)
    elements = _hash(torch.arange(num_elements, dtype=torch.int32, device=device))
    dropped_below = round(p * 2**32) - 2**31
    at_once = num_samples
    if device.type == "cpu":
        at_once = max(1, _BLOCK_ELEMENTS // max(num_elements, 1))
    for start in range(0, num_samples, max(at_once, 1)):
        numbers = _hash(samples[start : start + at_once, None] + elements)
        torch.ge(numbers, dropped_below, out=kept[start : start + at_once])
    return kept


def _hash(numbers: Tensor) -> Tensor:
    """Hash int32 numbers in place by a bijection (C. Wellons' lowbias32, 2018, without its last
    shift)."""
    shifted = numbers >> 16
    # The shift keeps the sign; these bits must be zero.
    shifted &= 0xFFFF
    numbers ^= shifted
    numbers *= _signed(0x7FEB352D)
    torch.bitwise_right_shift(numbers, 15, out=shifted)
    shifted &= 0x1FFFF
    numbers ^= shifted
    numbers *= _signed(0x846CA68B)
    return numbers


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


# --- the modules ---


def _channels(dropout: Any, value: Tensor) -> Tensor | None:
    unbatched = {nn.Dropout1d: 2, nn.Dropout3d: 4}
    kind = next((k for k in unbatched if isinstance(dropout, k)), None)
    if kind is not None and value.ndim == unbatched[kind]:
        shape = torch.Size([1, value.shape[0], *[1] * (value.ndim - 1)])
        kept = draw(dropout, shape, value.device, p=dropout.p)
        return kept if kept is None else kept[0]
    shape = torch.Size([*value.shape[:2], *[1] * (value.ndim - 2)])
    return draw(dropout, shape, value.device, p=dropout.p)


def _elements(dropout: Any, value: Tensor) -> Tensor | None:
    return draw(dropout, value.shape, value.device, p=dropout.p)


def _drop(value: Tensor, kept: Tensor, p: float, *, inplace: bool) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 0.0
    return value.mul_(kept).mul_(scale) if inplace else value * kept * scale


def _drop_alpha(value: Tensor, kept: Tensor, p: float, *, inplace: bool) -> Tensor:
    """Set dropped elements to SELU's lower limit, keeping mean and variance (Klambauer et al.
    2017)."""
    if p >= 1:
        return value.mul_(0) if inplace else value * 0
    limit = -1.7580993408473766
    scale = ((1 - p) * (1 + p * limit**2)) ** -0.5
    dropped = (kept.logical_not().to(value.dtype) * limit - p * limit) * scale
    return (value.mul_(kept) if inplace else value * kept).mul_(scale).add_(dropped)


def _keyed(kind: Any, mask: Any, drop: Any) -> Any:
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name for it
        # For a DTensor, torch itself draws a mask for the whole tensor.
        draws = self.training and self.p > 0 and type(input) in (Tensor, nn.Parameter)
        kept = mask(self, input) if draws else None
        if kept is None:
            value: Tensor = kind.forward(self, input)
            return value
        dropped: Tensor = drop(input, kept, self.p, inplace=self.inplace)
        return dropped

    return type(f"Keyed{kind.__name__}", (kind,), {"forward": forward, "__module__": __name__})


KeyedDropout = _keyed(nn.Dropout, _elements, _drop)
KeyedDropout1d = _keyed(nn.Dropout1d, _channels, _drop)
KeyedDropout2d = _keyed(nn.Dropout2d, _channels, _drop)
KeyedDropout3d = _keyed(nn.Dropout3d, _channels, _drop)
KeyedAlphaDropout = _keyed(nn.AlphaDropout, _elements, _drop_alpha)
KeyedFeatureAlphaDropout = _keyed(nn.FeatureAlphaDropout, _channels, _drop_alpha)

_KEYED: dict[type[nn.Module], type[nn.Module]] = {
    keyed.__base__: keyed
    for keyed in (
        KeyedDropout,
        KeyedDropout1d,
        KeyedDropout2d,
        KeyedDropout3d,
        KeyedAlphaDropout,
        KeyedFeatureAlphaDropout,
    )
}
_PLAIN = {keyed: plain for plain, keyed in _KEYED.items()}
_DROPOUTS = tuple(_KEYED)
