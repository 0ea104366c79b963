"""Model of bench/strategies.py, and each strategy in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

WIDTH, NUM_PAIRS, GLOBAL_BATCH, NUM_SAMPLES = 256, 4, 16, 256
MICROBATCHES = 4
Step = Callable[[Tensor, Tensor], None]
"""One optimizer step on this rank's share of a batch."""


def new_model() -> nn.Module:
    """Four pairs of layers, 256 wide: 2.1 MB."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_PAIRS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def samples() -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(NUM_SAMPLES, WIDTH, generator=generator),
        torch.randn(NUM_SAMPLES, WIDTH, generator=generator),
    )


def shares(strategy: str) -> int:
    """Return into how many shares a batch is split: 1 if every rank works on the whole batch."""
    return 1 if strategy in ("tensor", "pipeline") else dist.get_world_size()


def plain(strategy: str) -> Step:
    """Return a step of the strategy, written with torch alone."""
    return {
        "ddp": _ddp,
        "zero1": _zero1,
        "zero2": lambda: _sharded(reshard=False),
        "fsdp": lambda: _sharded(reshard=True),
        "tensor": _tensor,
        "pipeline": _pipeline,
    }[strategy]()


def _ddp() -> Step:
    model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    return _ordinary(model, new_optimizer(model))


def _zero1() -> Step:
    model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    return _ordinary(model, optimizer)


def _sharded(*, reshard: bool) -> Step:
    model: Any = new_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return _ordinary(model, new_optimizer(model))


def _tensor() -> Step:
    model = new_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {}
    for pair in range(NUM_PAIRS):
        styles[str(3 * pair)] = ColwiseParallel()
        styles[str(3 * pair + 2)] = RowwiseParallel()
    parallelize_module(model, mesh, styles)
    return _ordinary(model, new_optimizer(model))


def _pipeline() -> Step:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers = list(new_model().children())
    size = len(layers) // world_size
    own = nn.Sequential(*layers[rank * size : (rank + 1) * size])
    optimizer = new_optimizer(own)
    stage = PipelineStage(own, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mse_loss)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        last = rank == world_size - 1
        arguments = (inputs,) if rank == 0 else ()
        schedule.step(*arguments, target=targets if last else None, losses=losses if last else None)
        optimizer.step()

    return step


def _ordinary(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step
