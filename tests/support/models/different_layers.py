"""Ranks that split layers, of which some compute with other layers than the others."""

import os
from typing import Any

import torch
import torch.distributed as dist
from support.collectives.strategy_runs import Run, entered, take_step
from support.models.left_out_layers import loader
from support.models.seeding import seeded
from torch import Tensor, nn, tanh
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from shoal.strategies.layout.strategy import LayoutStrategy
from shoal_client.bulk.way import TRANSPORT_VARIABLE
from shoal_proto.errors import InvalidSpec


class Twins(nn.Module):
    """Has two blocks of the same sizes, and a norm that is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.differs = ""
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.twins = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(2)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = tanh(self.inner(inputs))
        for twin in reversed(self.twins) if self.differs == "order" else self.twins:
            hidden = hidden + twin(hidden)
        outputs: Tensor = self.outer(hidden if self.differs == "norm" else self.norm(hidden))
        return outputs


def refused_to(
    ranks: tuple[int, ...],
    made: tuple[type[LayoutStrategy], dict[str, Any]],
    differs: str,
    where: str,
    transport: str,
) -> str:
    """With what a member is refused when these compute with other layers, behind a sound step."""
    os.environ[TRANSPORT_VARIABLE] = transport
    with seeded(0):
        model = Twins()
    optimizer = SGD(model.parameters(), lr=0.05)
    kind, options = made
    strategy = kind(min_split_bytes=0, **options)
    run = Run(build=lambda _: (model, optimizer), loader=loader, loss=cross_entropy)
    share = entered(run, strategy)
    batch = loader().synchronous(0, *share)
    take_step(strategy, batch, cross_entropy)
    module: Any = strategy.module
    module.differs = differs if dist.get_rank() in ranks else ""
    try:
        if where == "a step":
            take_step(strategy, batch, cross_entropy)
        else:
            with torch.no_grad():
                strategy.module(batch.inputs)
            strategy.finish_passes()
    except InvalidSpec as error:
        assert strategy.step == 1
        return str(error)
    return ""
