"""Buffers in `session.state_dict()` are the same on every member, though members' samples
differ."""

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import Run, by_a_rank, entered, take_step, weights_of
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy

MADE: Mapping[str, Callable[[], Strategy]] = {
    "ddp": shoal.DDP,
    "zero1": partial(shoal.Zero1, copies=0),
    "zero2": partial(shoal.Zero2, copies=0),
    "fsdp": partial(shoal.FSDP, copies=0),
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0, copies=0),
    "pipeline": partial(shoal.Pipeline, microbatches=2, copies=0),
    "hybrid": partial(shoal.Hybrid, pipeline=1, tensor=1, copies=0),
    "local-sgd": partial(shoal.LocalSGD, every_steps=2),
    "diloco": partial(shoal.DiLoCo, every_steps=2),
}


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def loader() -> Loader:
    inputs = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    order = Order(num_samples=24, global_batch_size=12, num_epochs=20)
    return Loader((inputs, inputs[:, :2]), order)


RUN = Run(build=build, loader=loader, loss=nn.functional.mse_loss, num_steps=4)


def shown(made: Callable[[], Strategy]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a rank's state after the last step, and after an additional forward pass of its own,
    as of a script that forgets `model.eval()`."""
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    rank, share = dist.get_rank(), entered(RUN, strategy)
    for step in range(RUN.num_steps):
        take_step(strategy, loader().synchronous(step, *share), RUN.loss)
    found = weights_of(strategy)
    with torch.no_grad():
        strategy.module(torch.full((3, 5), float(rank)))
    later = weights_of(strategy)
    strategy.finish()
    strategy.close()
    return found, later


@pytest.mark.parametrize("name", MADE)
def test_every_member_shows_the_same_running_statistics(name: str) -> None:
    both = run_in_memory(shown, 3, MADE[name])
    ranks = [found for found, _ in both]
    assert set(ranks[0]) == set(build(0)[0].state_dict())
    assert not torch.equal(ranks[0]["1.running_mean"], torch.zeros(7)), "none were kept"
    assert ranks[0]["1.num_batches_tracked"] > 0
    for found in ranks[1:]:
        assert all(torch.equal(found[key], ranks[0][key]) for key in ranks[0])
    if name in ("zero1", "zero2", "fsdp", "hybrid"):  # these gather the buffers in each call
        first, *others = [later for _, later in both]
        assert not torch.equal(first["1.running_mean"], ranks[0]["1.running_mean"])
        for found in others:
            assert all(torch.equal(found[key], first[key]) for key in first)


class Tied(nn.Module):
    """A model whose names are in no alphabetical order, and one of whose weights has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.z = nn.Linear(5, 5)
        self.bias = nn.Parameter(torch.zeros(5))
        self.norm = nn.BatchNorm1d(5)
        self.a = nn.Linear(5, 5)
        self.a.weight = self.z.weight
        self.out = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.a(self.norm(self.z(inputs) + self.bias) * self.scale))
        return outputs


def build_tied(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


IN_ORDER: Mapping[str, Callable[[], Strategy]] = {
    **MADE,
    "hsdp": partial(shoal.HSDP, shard=2, copies=0),
    "fsdp-tensor": partial(shoal.FSDPTensor, min_split_bytes=0, copies=0),
    "hybrid": partial(shoal.Hybrid, pipeline=2, tensor=1, microbatches=2, copies=0),
}


@pytest.mark.parametrize("strategy", IN_ORDER)
def test_state_dict_has_the_order_of_the_models_own(strategy: str) -> None:
    """Scripts iterate over both together. Regression: the state was sorted by name if the model is
    spread over members."""
    run = Run(build=build_tied, loader=loader, loss=nn.functional.mse_loss, num_steps=2)
    for weights in run_in_memory(by_a_rank, 4, run, IN_ORDER[strategy]):
        assert list(weights) == list(Tied().state_dict())
