"""Values that a script assigns to the `.data` of its parameters count, as in one process."""

from collections.abc import Callable, Sequence

import pytest
import torch
from support.collectives.strategy_runs import Run, difference, entered
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from worker.strategies import test_equality as equality

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.synchronous.strategy import SynchronousStrategy

NUM_STEPS = 5
Places = Sequence[tuple[int, bool]]
"""Steps, each with True or False for before or after the backward pass."""


@torch.no_grad()
def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@torch.no_grad()
def spread_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


Assigns = Callable[[nn.Module], None]


def by_one_process(model: nn.Module, optimizer: Optimizer, assigns: Assigns) -> dict[str, Tensor]:
    loader = equality.loader()
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        if step == 3:
            assigns(model)
        equality.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        if step == 1:
            assigns(model)
        optimizer.step()
        if step == 2:
            assigns(model)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def by_a_rank(name: str, kind: str, assigns: Assigns) -> dict[str, Tensor]:
    """Train as a rank that assigns between two steps, and in a step before and after its backward
    pass."""
    model, optimizer = equality.build(kind, 0)
    strategy = equality.made(name, 2)()
    assert isinstance(strategy, SynchronousStrategy)
    run = Run(build=lambda _: (model, optimizer), loader=equality.loader, loss=equality.loss)
    share, loader = entered(run, strategy), equality.loader()
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, *share)
        strategy.begin_step()
        if step == 3:
            assigns(strategy.module)
        strategy.forward_backward(batch.inputs, batch.targets, equality.loss, batch.weight)
        if step == 1:
            assigns(strategy.module)
        strategy.end_step(lambda: None)
        if step == 2:
            assigns(strategy.module)
    found = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
    strategy.close()
    return found


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("assigns", [assign, spread_vector])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_assigned_data_counts_on_every_member(strategy: str, kind: str, assigns: Assigns) -> None:
    """Regression: under zero1 owners sent, and others received, the previous contents of the
    memory."""
    expected = by_one_process(*equality.build(kind, 0), assigns)
    for ours in run_in_memory(by_a_rank, 2, strategy, kind, assigns):
        assert difference(ours, expected) < equality.TOLERANCE
