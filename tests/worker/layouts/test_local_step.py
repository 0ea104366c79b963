"""A step on local parts changes parameters and state as the optimizer does with DTensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import shoal
from shoal.layouts import local_step
from shoal.strategies.base import Strategy

MAKE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.01),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=0.1),
    "asgd": lambda parameters: optim.ASGD(parameters, lr=0.1),
    "nadam": lambda parameters: optim.NAdam(parameters, lr=0.1),
}


def _trained(name: str, strategy: Strategy, step: Callable[[optim.Optimizer], Any]) -> list[Any]:
    """Return each tensor of parameters and state after three steps, with its placement."""
    # Five rows over three ranks: the last one holds one row, and no row of the layer of two.
    model: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    for parameter in model.parameters():  # ranks are threads here, and share a generator
        parameter.data = torch.linspace(-1, 1, parameter.numel()).view_as(parameter)
    optimizer = MAKE[name](model.parameters())
    model, optimizer = shoal.distribute(model, optimizer, strategy)
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        step(optimizer)
    found: list[Any] = []
    for parameter in model.parameters():
        found += [_shown(parameter), *map(_shown, optimizer.state[parameter].values())]
    return found


def _shown(value: Any) -> tuple[str, Any]:
    if isinstance(value, DTensor):
        return str(value.placements), value.full_tensor().detach()
    return "", value


@pytest.mark.parametrize("name", MAKE)
def test_a_local_step_equals_the_step_on_dtensors(name: str) -> None:
    """Values are equal bit for bit, and former DTensors are DTensors again."""

    def body() -> tuple[list[Any], list[Any]]:
        strategy = shoal.FSDP(min_group_bytes=0)
        return (
            _trained(name, strategy, local_step.step),
            _trained(name, strategy, lambda optimizer: optimizer.step()),
        )

    for local, whole in shoal.run_in_memory(body, 3):
        assert len(local) == len(whole) > 4
        for (kind, own), (expected_kind, expected) in zip(local, whole, strict=True):
            assert kind == expected_kind
            assert torch.equal(own, expected) if isinstance(own, Tensor) else own == expected


def test_a_step_that_raises_leaves_the_optimizer_with_its_own_parameters() -> None:
    def body() -> bool:
        model: nn.Module = nn.Linear(4, 4)
        optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = shoal.distribute(model, optimizer, "fsdp")
        model(torch.ones(2, 4)).sum().backward()

        def refuse(*_: object) -> None:
            seen = [each for group in optimizer.param_groups for each in group["params"]]
            assert not any(isinstance(each, DTensor) for each in seen)
            raise ValueError("in the optimizer")

        optimizer.register_step_pre_hook(refuse)
        before = list(model.parameters())
        with pytest.raises(ValueError, match="in the optimizer"):
            local_step.step(optimizer)
        held = [each for group in optimizer.param_groups for each in group["params"]]
        return all(own is first for own, first in zip(held, before, strict=True))

    assert shoal.run_in_memory(body, 2) == [True, True]
