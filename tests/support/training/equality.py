"""Training whose weights any strategy must reach as one process does.

The model has widths that no number of ranks divides, and members' shares of a batch differ in size.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from support.collectives.strategy_runs import Run
from support.models.seeding import draw_parameters
from torch import Tensor, nn

import shoal
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.strategies.base import Strategy

TOLERANCE = 1e-5
"""Limit for fp32; only the order of additions differs."""
NUM_SAMPLES = 47


class Net(nn.Module):
    """A model of indivisible widths, one of them below the number of ranks, and with an unused
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh()),
            *(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5)),
        )
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def build(optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    draw_parameters(model, seed)
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def samples(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs.sum(1) > 0).long()


def loader() -> Loader:
    """Return batches of 10 and, at the end of an epoch, of 7."""
    order = Order(num_samples=NUM_SAMPLES, global_batch_size=10, num_epochs=20)
    return Loader(samples(), order)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets)


def run_of(optimizer: str, **options: object) -> Run:
    return Run(build=partial(build, optimizer), loader=loader, loss=loss, **options)  # type: ignore[arg-type]


# torch's DDP needs an option for parameters that may get no gradient.
STRATEGIES: Mapping[str, Callable[..., Strategy]] = {
    "ddp": partial(shoal.DDP, find_unused_parameters=True),
    "zero1": partial(shoal.Zero1, find_unused_parameters=True, copies=0),
    "zero2": partial(shoal.Zero2, copies=0),
    "fsdp": partial(shoal.FSDP, min_group_bytes=200, copies=0),
    "hsdp": partial(shoal.HSDP, shard=2, min_group_bytes=200, copies=0),
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0, copies=0),
    "fsdp-tensor": partial(
        shoal.FSDPTensor, tensor=2, min_split_bytes=0, min_group_bytes=200, copies=0
    ),
    "pipeline": partial(shoal.Pipeline, copies=0),
    "hybrid": partial(shoal.Hybrid, min_split_bytes=0, copies=0),
}
TWO_DIMENSIONS = ("hsdp", "fsdp-tensor")
WORLDS = [
    # Two by two come first: with other small world sizes these are like "fsdp".
    ("hsdp", 4),
    ("fsdp-tensor", 4),
    *((n, size) for n in STRATEGIES if n not in TWO_DIMENSIONS for size in (2, 3, 4)),
    *(("fsdp-tensor", 2), ("hsdp", 6), ("fsdp-tensor", 6), ("hybrid", 8)),
]
MESHES = {2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}
"""Stages, copies and splits of "hybrid", by world size."""


def made(strategy: str, world_size: int, **options: str) -> Callable[[], Strategy]:
    sizes: dict[str, int] = {}
    if strategy == "hybrid":
        sizes = dict(zip(("pipeline", "data", "tensor"), MESHES[world_size], strict=True))
    return partial(STRATEGIES[strategy], **sizes, **options)
