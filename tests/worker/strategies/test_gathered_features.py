"""A contrastive loss that gathers the features of all members, as scripts for DDP do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import Run, by_a_rank, by_one_process, difference
from support.models.seeding import draw_parameters
from support.training import equality
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.strategies.base import Strategy

TOLERANCE = 1e-5
STRATEGIES = {
    "ddp": shoal.DDP,
    "zero1": lambda: shoal.Zero1(copies=0),
    "zero2": lambda: shoal.Zero2(copies=0),
    "fsdp": lambda: shoal.FSDP(min_group_bytes=200, copies=0),
}


class Gather(torch.autograd.Function):
    """Gathering as in implementations of SimCLR: a feature's gradients from all ranks' losses are
    summed."""

    @staticmethod
    def forward(context: Any, own: Tensor) -> tuple[Tensor, ...]:
        found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return tuple(found)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        every = torch.stack(gradients)
        dist.all_reduce(every)
        return every[dist.get_rank()]


def contrastive(features: Tensor, others: Tensor) -> Tensor:
    """Contrastive loss with the other samples of the global batch as negatives."""
    own, keys = (nn.functional.normalize(each) for each in (features, features.roll(1, 1) + others))
    first, every = 0, keys
    if dist.is_initialized():
        first = dist.get_rank() * len(own)
        every = torch.cat(Gather.apply(keys))  # type: ignore[no-untyped-call]
    return nn.functional.cross_entropy(own @ every.T / 0.2, first + torch.arange(len(own)))


def build(_: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    draw_parameters(model, 0)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loader() -> Loader:
    inputs, _ = equality.samples(24)
    order = Order(num_samples=24, global_batch_size=12, num_epochs=4)
    return Loader((inputs, inputs[:, :4]), order)


RUN = Run(build=build, loader=loader, loss=contrastive, num_steps=6)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_shares_train_what_one_process_does(name: str, world_size: int) -> None:
    made: Callable[[], Strategy] = STRATEGIES[name]
    expected = by_one_process(RUN)
    for ours in run_in_memory(by_a_rank, world_size, RUN, made):
        assert difference(ours, expected) < TOLERANCE
