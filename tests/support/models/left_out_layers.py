"""Ranks of which one leaves a layer out that the others compute with."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.collectives.strategy_runs import Run, entered, take_step
from support.models.seeding import seeded
from torch import Tensor, nn, tanh
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_client.connection.transport import TRANSPORT_VARIABLE
from shoal_proto.errors import InvalidSpec


def loader() -> Loader:
    with seeded(1):
        data = torch.utils.data.TensorDataset(torch.randn(60, 6), torch.randint(5, (60,)))
    return Loader(data, Order(num_samples=60, global_batch_size=24), None)


class Chain(nn.Module):
    """Layers of different sizes in sequence; leaves out the layer named in `left_out`."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = ""
        self.first, self.drop, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 5)
        self.end = nn.Linear(5, 5, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.left_out != "drop":
            hidden = hidden + self.drop(hidden)
        outputs: Tensor = self.last(tanh(hidden))
        return outputs if self.left_out == "end" else self.end(outputs)


def refused_to(
    ranks: tuple[int, ...],
    made: tuple[type[ShardedStrategy], dict[str, Any]],
    where: str,
    transport: str = "auto",
) -> str:
    """Return a member's refusal when these ranks leave a layer out, after one sound step."""
    os.environ[TRANSPORT_VARIABLE] = transport
    with seeded(0):
        model = Chain()
    kind, options = made
    layer, at = where.split(" in ")

    def leave_out(module: Any) -> None:
        module.left_out = layer if dist.get_rank() in ranks else ""

    return refused_after_a_step(model, kind(min_group_bytes=0, **options), leave_out, at)


def refused_after_a_step(
    model: nn.Module, strategy: ShardedStrategy, change: Callable[[Any], None], at: str
) -> str:
    """Return a member's refusal after a sound step and a change to the model; empty if there is
    none. `at`: "a step", or anything else for an evaluation."""
    optimizer = SGD(model.parameters(), lr=0.05)
    run = Run(build=lambda _: (model, optimizer), loader=loader, loss=cross_entropy)
    share = entered(run, strategy)
    batch = loader().synchronous(0, *share)
    take_step(strategy, batch, cross_entropy)
    change(strategy.module)
    try:
        if at == "a step":
            take_step(strategy, batch, cross_entropy)
        else:
            with torch.no_grad():
                strategy.module(batch.inputs)
            strategy.finish_passes()
    except InvalidSpec as error:
        assert strategy.step == 1
        return str(error)
    return ""
