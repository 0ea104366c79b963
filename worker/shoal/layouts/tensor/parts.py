"""Linear, embedding and dropout modules of which each rank computes a part.

Outside a split region, every value is the same on all ranks. A value that enters a region has its
gradient summed over the ranks; a value that leaves it is gathered or summed. torch.compile skips
these modules: DTensors are new in each generation.

(M. Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.)
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.layouts.tensor.layer_group import LayerGroup
from shoal.layouts.tensor.plan import part_sizes
from shoal.model.gradients import first_order
from shoal.randomness.dropout import draw
from shoal.torch_private.compiling import eager
from shoal.torch_private.dtensor import cut_as, local_of


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Cut of one dimension over the ranks of a group."""

    group: LayerGroup
    rank: int
    sizes: tuple[int, ...]
    """Size of each rank's part; zeros at the end if earlier ranks hold all elements."""

    @classmethod
    def of(cls, size: int, group: LayerGroup) -> "Cut":
        ranks = group.ranks
        return cls(group=group, rank=ranks.rank, sizes=part_sizes(size, ranks.size))

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """Size of this rank's part."""
        return self.sizes[self.rank]

    def own(self, whole: Tensor, dim: int = -1) -> Tensor:
        return whole.narrow(dim, self.start, self.size)


parts_only = first_order("each rank computes only its part of a split layer's gradients")
"""Decorator of a Function's backward: a second derivative would have this rank's part only."""


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: LayerGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @parts_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradients[0], backward=True), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: LayerGroup) -> Tensor:
        return group.all_reduce(value)

    @staticmethod
    @parts_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        # Padded: not every backend gathers parts of different sizes.
        widest = max(cut.sizes)
        padded = part.new_zeros((*part.shape[:-1], widest))
        padded.narrow(-1, 0, cut.size).copy_(part)
        parts = cut.group.all_gather(padded)
        return torch.cat([p.narrow(-1, 0, s) for p, s in zip(parts, cut.sizes, strict=True)], -1)

    @staticmethod
    @parts_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.cut.own(gradients[0]), None


def enter(value: Tensor, cut: Cut) -> Tensor:
    """Take a value that is the same on all ranks into a region where each computes a part."""
    entered: Tensor = _Enter.apply(value, cut.group)  # type: ignore[no-untyped-call]
    return entered


def summed(value: Tensor, cut: Cut) -> Tensor:
    """Leave a region with the sum over the ranks."""
    total: Tensor = _Sum.apply(value, cut.group)  # type: ignore[no-untyped-call]
    return total


def gathered(part: Tensor, cut: Cut) -> Tensor:
    """Leave a region with the ranks' parts concatenated along the last dimension."""
    whole: Tensor = _Gather.apply(part, cut)  # type: ignore[no-untyped-call]
    return whole


class _Local(torch.autograd.Function):
    """Local part of a parameter; its gradient is cut as the parameter is. (`DTensor.to_local` lets
    autograd make a whole copy, before torch 2.13.)"""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.parameter = parameter
        part = local_of(parameter)
        return part.view_as(part)

    @staticmethod
    @parts_only
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return cut_as(ctx.parameter, gradient.contiguous())


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; gradients flow back into the parameter."""
    if not isinstance(parameter, DTensor):
        return parameter
    part: Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
    return part


def biased(total: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to a sum over the ranks, in the sum's dtype: as a linear layer under autocast."""
    return total if bias is None else total + bias.to(total.dtype)


class ColumnLinear(nn.Linear):
    """Linear layer in which each rank computes some of the outputs."""

    cut: Cut
    gathers: bool
    """True: returns all outputs. False: returns this rank's outputs, for a RowLinear."""

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        bias = None if self.bias is None else local(self.bias)
        part = F.linear(enter(input, self.cut), local(self.weight), bias)
        return gathered(part, self.cut) if self.gathers else part


class RowLinear(nn.Linear):
    """Linear layer in which each rank computes a summand of all outputs from some inputs."""

    cut: Cut
    takes_part: bool
    """True if the input has this rank's part only, from a ColumnLinear that does not gather."""

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        own = input if self.takes_part else self.cut.own(enter(input, self.cut))
        return biased(summed(F.linear(own, local(self.weight)), self.cut), self.bias)


class VocabEmbedding(nn.Embedding):
    """Embedding in which each rank looks up the rows that it holds."""

    cut: Cut

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        weight = local(self.weight)
        if not self.cut.size:
            rows = weight.new_zeros(1, 1).expand(self.num_embeddings, self.embedding_dim)
            # The sum of no elements: 0, which keeps the weight in the graph.
            return summed(weight.sum() + F.embedding(input, rows), self.cut)
        row = input - self.cut.start
        before = (row < 0) & (input >= 0)
        after = (row >= self.cut.size) & (input < self.num_embeddings)
        # An index that no rank holds is left as it is: torch refuses it on every rank.
        foreign = before | after
        padding = self._own_padding()
        own = F.embedding(row.masked_fill(foreign, 0), weight, padding)
        return summed(own.masked_fill(foreign.unsqueeze(-1), 0), self.cut)

    def _own_padding(self) -> int | None:
        if self.padding_idx is None:
            return None
        row = self.padding_idx - self.cut.start
        return row if 0 <= row < self.cut.size else None


class ColumnEmbedding(nn.Embedding):
    """Embedding in which each rank looks up some of the columns of every row."""

    cut: Cut

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        return gathered(F.embedding(input, local(self.weight), self.padding_idx), self.cut)


class CutDropout(nn.Dropout):
    """Dropout between a ColumnLinear and a RowLinear: each rank uses its part of the whole width's
    mask. Unless the module is keyed (`randomness.dropout.key_dropout`), the ranks' generators must
    be in the same state."""

    cut: Cut

    @eager
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name, callers may use it
        if not self.training or not self.p:
            return input
        whole = torch.Size([*input.shape[:-1], sum(self.cut.sizes)])
        kept = draw(self, whole, input.device, p=self.p)
        if kept is None:
            return input * self.cut.own(whole_mask(input, -1, self.cut, self.p))
        return input * self.cut.own(kept) * (1 / (1 - self.p) if self.p < 1 else 0.0)


def whole_mask(part: Tensor, dim: int, cut: Cut, p: float) -> Tensor:
    """Draw dropout's factors for the whole value, of which `part` is this rank's part."""
    shape = list(part.shape)
    shape[dim] = sum(cut.sizes)
    return F.dropout(part.new_ones(shape), p, training=True)
