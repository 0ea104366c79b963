"""Ranks that split layers; some of them compute with other layers than the rest."""

import os
from typing import Any

import torch.distributed as dist
from support.models.left_out_layers import refused_after_a_step
from support.models.seeding import seeded
from torch import Tensor, nn, tanh

from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_client.connection.transport import TRANSPORT_VARIABLE


class Twins(nn.Module):
    """A model with two blocks of the same sizes, and a norm that is not split."""

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
    made: tuple[type[ShardedStrategy], dict[str, Any]],
    differs: str,
    where: str,
    transport: str,
) -> str:
    """Return a member's refusal when these ranks compute with other layers, after a sound step."""
    os.environ[TRANSPORT_VARIABLE] = transport
    with seeded(0):
        model = Twins()
    kind, options = made

    def change(module: Any) -> None:
        module.differs = differs if dist.get_rank() in ranks else ""

    return refused_after_a_step(model, kind(min_split_bytes=0, **options), change, where)
