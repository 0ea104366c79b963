"""Sequence parallelism: between split layers, each rank computes only its positions of the
sequence.

An all-gather and a reduce-scatter replace tensor parallelism's all-reduce. (V. Korthikanti et al.,
Reducing Activation Recomputation, arXiv:2205.05198, section 4.2.)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from shoal.layouts.tensor.layer_group import LayerGroup, TensorGroup
from shoal.layouts.tensor.parts import (
    ColumnLinear,
    Cut,
    RowLinear,
    biased,
    local,
    parts_only,
    whole_mask,
)
from shoal.layouts.tensor.plan import SequenceEntry, SequenceRole
from shoal.model.local_parts import local_part
from shoal.randomness.dropout import draw
from shoal.torch_private.compiling import eager
from shoal.torch_private.modules import parameter_table
from shoal_proto.errors import InvalidSpec

DIM = -2
"""Dimension before the features, usually the sequence."""


class Positions:
    """Cut of the sequence of the pass in progress; one object for all modules of a block."""

    def __init__(self, group: LayerGroup) -> None:
        self._group = group
        self._length = 0

    def begin(self, whole: Tensor) -> None:
        """Begin a pass with a whole value, which sets the length of the sequence. Raises
        InvalidSpec for a value of fewer than two dimensions."""
        if whole.ndim < 2:
            raise InvalidSpec(
                "a block with spread positions got a value without positions",
                seen=f"shape {tuple(whole.shape)}",
                expected="(samples, positions, features)",
            )
        self._length = whole.shape[DIM]

    @property
    def cut(self) -> Cut:
        return Cut.of(self._length, self._group)


def _gather(own: Tensor, cut: Cut, *, backward: bool = False) -> Tensor:
    if own.shape[DIM] != cut.size:
        raise InvalidSpec(
            "positions of one pass were used in another",
            seen=f"{own.shape[DIM]} positions on this rank",
            expected=f"{cut.size}",
            fix="For sequences of several lengths in a step, run one backward pass after each"
            " forward.",
        )
    widest = max(cut.sizes)
    rows = own.movedim(DIM, 0)
    padded = rows.new_zeros((widest, *rows.shape[1:]))
    padded[: cut.size].copy_(rows)
    parts = cut.group.all_gather(padded, backward=backward)
    whole = torch.cat([p[:size] for p, size in zip(parts, cut.sizes, strict=True)])
    return whole.movedim(0, DIM).contiguous()


def _sum_and_scatter(summand: Tensor, cut: Cut, *, backward: bool = False) -> Tensor:
    widest, n = max(cut.sizes), len(cut.sizes)
    rows = summand.movedim(DIM, 0)
    padded = rows.new_zeros((n, widest, *rows.shape[1:]))
    for target, part in zip(padded, torch.split(rows, list(cut.sizes)), strict=True):
        target[: len(part)].copy_(part)
    own = cut.group.reduce_scatter(padded, backward=backward)
    return own[: cut.size].movedim(0, DIM).contiguous()


def _own(whole: Tensor, cut: Cut) -> Tensor:
    # A copy, as a view would keep the memory of the whole.
    return cut.own(whole, DIM).clone(memory_format=torch.contiguous_format)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return _own(whole, cut)

    @staticmethod
    @parts_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.cut, backward=True), None


class _Whole(torch.autograd.Function):
    """All-gather, for modules that compute the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return _gather(own, cut)

    @staticmethod
    @parts_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _own(gradients[0], ctx.cut), None


class _Enter(torch.autograd.Function):
    """All-gather, for modules that compute a part of the features."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return _gather(own, cut)

    @staticmethod
    @parts_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_and_scatter(gradients[0], ctx.cut, backward=True), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return _sum_and_scatter(summand, cut)

    @staticmethod
    @parts_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.cut, backward=True), None


def _apply(function: Any, value: Tensor, positions: Positions) -> Tensor:
    result: Tensor = function.apply(value, positions.cut)
    return result


class SequenceColumnLinear(ColumnLinear):
    """ColumnLinear for an input of this rank's positions."""

    positions: Positions

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        bias = None if self.bias is None else local(self.bias)
        return F.linear(_apply(_Enter, input, self.positions), local(self.weight), bias)


class SequenceRowLinear(RowLinear):
    """RowLinear for an output of this rank's positions."""

    positions: Positions

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        total = _apply(_Leave, F.linear(input, local(self.weight)), self.positions)
        return biased(total, self.bias)


class SequenceDropout(nn.Dropout):
    """Dropout of this rank's positions, with its part of the mask of all positions."""

    positions: Positions

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        if not self.training or not self.p:
            return input
        cut = self.positions.cut
        shape = list(input.shape)
        shape[DIM] = sum(cut.sizes)
        kept = draw(self, torch.Size(shape), input.device, p=self.p)
        if kept is None:
            return input * cut.own(whole_mask(input, DIM, cut, self.p), DIM)
        return input * cut.own(kept, DIM) * (1 / (1 - self.p) if self.p < 1 else 0.0)


# --- roles of modules ---


def spread_positions(
    model: nn.Module, entries: Sequence[SequenceEntry], ranks: TensorGroup
) -> None:
    """Spread positions over ranks in the blocks of the entries. Called after `parallelise`."""
    by_block: dict[str, Positions] = {}
    for entry in entries:
        if entry.block not in by_block:
            by_block[entry.block] = Positions(ranks.of_layer(entry.block))
        _ROLES[entry.role](model.get_submodule(entry.module), entry, by_block[entry.block])


def summed_parameters(model: nn.Module, entries: Sequence[SequenceEntry]) -> frozenset[str]:
    """Name the parameters with gradients from this rank's positions only."""
    names = set()
    for entry in entries:
        module = model.get_submodule(entry.module)
        if entry.role == SequenceRole.NORM:
            names |= {f"{entry.module}.{name}" for name, _ in module.named_parameters()}
        elif entry.role == SequenceRole.ROW and parameter_table(module).get("bias") is not None:
            names.add(f"{entry.module}.bias")
    return frozenset(names)


def summands_of(parameters: Mapping[str, nn.Parameter], names: Collection[str]) -> list[Tensor]:
    """Return this rank's parts of these gradients; zeros for a missing one, as all ranks exchange
    the same number of elements."""
    return [
        torch.zeros_like(local_part(parameter))
        if parameter.grad is None
        else local_part(parameter.grad)
        for name, parameter in parameters.items()
        if name in names and parameter.requires_grad
    ]


def _block(module: nn.Module, entry: SequenceEntry, positions: Positions) -> None:
    @eager
    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        def spread(whole: Tensor) -> Tensor:
            positions.begin(whole)
            return _apply(_Spread, whole, positions)

        return _at(args, kwargs, entry.takes, spread)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(_leaving(_Whole, positions))


def _around(module: nn.Module, entry: SequenceEntry, positions: Positions) -> None:
    @eager
    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _at(args, kwargs, entry.takes, lambda own: _apply(_Whole, own, positions))

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(_leaving(_Spread, positions))


def _at(args: Any, kwargs: Any, takes: tuple[int | str, ...], change: Callable[..., Any]) -> Any:
    changed: dict[int, Tensor] = {}

    def once(value: Any) -> Any:
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    new = tuple(once(v) if index in takes else v for index, v in enumerate(args))
    return new, {name: once(v) if name in takes else v for name, v in kwargs.items()}


def _leaving(function: Any, positions: Positions) -> Any:
    @eager
    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        length = sum(positions.cut.sizes)
        if function is _Spread and (first.ndim < 2 or first.shape[DIM] != length):
            raise InvalidSpec(
                f"a {type(module).__name__} returned other positions than it was given",
                seen=f"shape {tuple(first.shape)}",
                expected=f"{length} in the last dimension but one",
                fix="Distribute without sequence=True.",
            )
        changed = _apply(function, first, positions)
        return (changed, *others) if isinstance(output, tuple) else changed

    return leave


def _with_class(kind: Any) -> Callable[[Any, SequenceEntry, Positions], None]:
    def apply(module: Any, entry: SequenceEntry, positions: Positions) -> None:
        module.__class__ = kind
        module.positions = positions

    return apply


_ROLES: Mapping[SequenceRole, Callable[[Any, SequenceEntry, Positions], None]] = {
    SequenceRole.BLOCK: _block,
    SequenceRole.NORM: lambda module, entry, positions: None,
    SequenceRole.DROPOUT: _with_class(SequenceDropout),
    SequenceRole.COLUMN: _with_class(SequenceColumnLinear),
    SequenceRole.ROW: _with_class(SequenceRowLinear),
    SequenceRole.AROUND: _around,
}
