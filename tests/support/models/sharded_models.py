"""Models that are hard to shard, with data and optimizers for them."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from support.processes.worlds import Training
from torch import Tensor, nn

from shoal.layouts.base import LayOut
from shoal.layouts.sharded.layout import ShardedLayout, ShardedOptions


def deep() -> nn.Module:
    """Make a model with widths that no number of ranks divides, some below the number of ranks."""
    widths = (5, 7, 3, 7, 11, 2)
    layers: list[nn.Module] = []
    for width, next_width in pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))


def transformer() -> nn.Module:
    return Encoded()


class Encoded(nn.Module):
    """A model of repeated blocks between small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(1, 6)
        layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.end = nn.Linear(30, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.encoder(self.begin(inputs.unsqueeze(-1)))
        outputs: Tensor = self.end(hidden.flatten(1))
        return outputs


class Tangled(nn.Module):
    """A model with parallel modules, one that runs twice, one unused, and the last one registered
    first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 2)
        self.branches = nn.ModuleList(nn.Linear(5, 7) for _ in range(3))
        self.twice = nn.Linear(7, 7)
        self.unused = nn.Linear(7, 7)
        self.between = nn.Linear(7, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third = (branch(inputs) for branch in self.branches)
        hidden = self.twice(torch.tanh(first) * second)
        hidden = self.twice(torch.tanh(self.between(hidden) + third))
        outputs: Tensor = self.last(torch.tanh(hidden)) + self.last(torch.tanh(first))
        return outputs


class Discarding(nn.Module):
    """Model in which the output of the last of three neighbours is unused, so backward never
    reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 7)
        self.neighbours = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.after = nn.Linear(7, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(inputs))
        first, second, _ = (layer(hidden) for layer in self.neighbours)
        outputs: Tensor = self.after(first * second)
        return outputs


class Tied(nn.Module):
    """A model whose first and last layers share a weight, and whose blocks share a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(5, 7, bias=False)
        shared = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.Tanh(), shared) for _ in range(3)
        )
        self.head = nn.Linear(7, 5)
        self.head.weight = nn.Parameter(self.embedding.weight.detach().t().contiguous())
        self.back = nn.Linear(5, 7)
        self.back.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        outputs: Tensor = self.back(self.head(hidden))[:, :2]
        return outputs


class PartlyFrozen(nn.Module):
    """Model with frozen parts before, between and within trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 2)]
        )
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)
        layer = self.layers[3]
        assert isinstance(layer, nn.Linear)
        layer.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


class Sometimes(nn.Module):
    """Model in which one of two layers, or one of two weights, gets no gradient in every other
    step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.one, self.other = nn.Linear(7, 2), nn.Linear(7, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        even = int(self.calls) % 2 == 0
        self.calls += 1
        hidden = torch.tanh(self.first(inputs))
        outputs: Tensor = self.one(hidden) * self.scale if even else self.other(hidden)
        return outputs


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(60, 5, generator=generator), torch.randn(60, 2, generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def training_of(
    model: Callable[[], nn.Module],
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    **settings: Any,
) -> Training:
    given = {"num_steps": 10, "batch_size": 13, **settings}  # 13: shares of unequal size
    return Training(
        model=model, optimizer=optimizer, data=data, loss=nn.functional.mse_loss, **given
    )


def lay_out(**options: Any) -> LayOut:
    """Make a layout function that can be sent to a process, as it is importable by name."""
    return partial(_sharded, ShardedOptions(**options))


def _sharded(options: ShardedOptions, model: nn.Module, world: Any) -> ShardedLayout:
    return ShardedLayout(model, world, options)
