"""Bodies of two ranks under mpiexec: training with DDP and in one process, and an error."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 5


def _trained(module: nn.Module, model: nn.Module, rank: int, size: int) -> list[list[float]]:
    samples = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 5, generator=samples)[rank::size]
    targets = torch.randn(12, 3, generator=samples)[rank::size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def alone() -> list[list[float]]:
    model = _model()
    return _trained(model, model, 0, 1)


def by_ddp() -> list[list[float]]:
    model = _model()
    ddp = DistributedDataParallel(model)
    return _trained(ddp, model, dist.get_rank(), dist.get_world_size())


def short_message() -> str:
    """Return rank 0's error for a message shorter than its receive buffer."""
    if dist.get_rank() == 1:
        dist.send(torch.ones(1), 0)
        return ""
    try:
        dist.recv(torch.ones(3), 1)
    except dist.DistBackendError as error:
        return str(error)
    return "nothing"


def report() -> dict[str, Any]:
    return {"parameters": by_ddp(), "short": short_message()}
