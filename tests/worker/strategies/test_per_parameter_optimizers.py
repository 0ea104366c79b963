"""Strategies whose members each step some of the parameters refuse optimizers that may need all."""

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal_proto.errors import UnsupportedOptimizer

STRATEGIES: dict[str, type[ShardedStrategy]] = {
    "zero1": shoal.Zero1,
    "pipeline": shoal.Pipeline,
    "hybrid": shoal.Hybrid,
}


class ClipsAll(torch.optim.SGD):
    """An optimizer that scales the gradients to a common norm within its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(0.1 / norm)
        super().step(closure)


class ByTensor(torch.optim.SGD):
    """A user's optimizer that declares what it needs."""

    per_parameter = True


class Inherits(ByTensor):
    """An optimizer that declares nothing itself."""


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 4, bias=False))


@pytest.mark.parametrize("kind", [ClipsAll, Inherits])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_that_may_need_all_parameters_is_refused(
    strategy: str, kind: type[torch.optim.SGD]
) -> None:
    """A member would take the norm of only those that it owns: other weights, and no error."""
    built = model()
    optimizer = kind(built.parameters(), lr=0.1)
    with pytest.raises(UnsupportedOptimizer, match=kind.__name__) as refused:
        STRATEGIES[strategy]().distribute(built, optimizer)
    assert "ddp" in refused.value.fix
    with pytest.raises(UnsupportedOptimizer, match=kind.__name__):
        shoal.plan(built, strategy, world_size=2, optimizer=optimizer)
    shoal.DDP().distribute(built, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, ByTensor])
def test_an_optimizer_that_needs_whole_parameters_is_accepted_if_they_are_whole(
    kind: Any,
) -> None:
    for strategy in (shoal.Zero1(), shoal.Pipeline(), shoal.Hybrid(tensor=1)):
        built = model()
        strategy.distribute(built, kind(built.parameters(), lr=0.1))
    built = model()
    with pytest.raises(UnsupportedOptimizer, match="may need them whole"):
        shoal.Hybrid().distribute(built, kind(built.parameters(), lr=0.1))


def test_an_optimizer_that_the_user_vouches_for_is_accepted() -> None:
    vouched = (
        shoal.Zero1(per_parameter_optimizer=True),
        shoal.Pipeline(per_parameter_optimizer=True),
        shoal.Hybrid(elementwise_optimizer=True),
        shoal.Hybrid(elementwise_optimizer=True, tensor=1),
    )
    for strategy in vouched:
        built = model()
        strategy.distribute(built, Inherits(built.parameters(), lr=0.1))
