"""Values that a script assigns to the `.data` of its parameters count, as in one process."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.collectives.strategy_runs import Rank, by_a_rank, by_one_process, difference
from support.training import equality
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch

NUM_STEPS = 5


@torch.no_grad()
def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@torch.no_grad()
def spread_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())


Assigns = Callable[[nn.Module], None]


def alone(assigns: Assigns, model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    if batch.step == 3:
        assigns(model)
    equality.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
    if batch.step == 1:
        assigns(model)
    optimizer.step()
    if batch.step == 2:
        assigns(model)


def take(assigns: Assigns, rank: Rank, batch: Batch) -> None:
    """Take a step as a rank that assigns between two steps, and in a step before and after its
    backward pass."""
    strategy = rank.strategy
    strategy.begin_step()
    if batch.step == 3:
        assigns(strategy.module)
    strategy.forward_backward(batch.inputs, batch.targets, equality.loss, batch.weight)
    if batch.step == 1:
        assigns(strategy.module)
    strategy.end_step(lambda: None)
    if batch.step == 2:
        assigns(strategy.module)


@pytest.mark.sampled("strategy")
@pytest.mark.parametrize("assigns", [assign, spread_vector])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_assigned_data_counts_on_every_member(strategy: str, kind: str, assigns: Assigns) -> None:
    """Regression: under zero1 owners sent, and others received, the previous contents of the
    memory."""
    run, made = equality.run_of(kind, num_steps=NUM_STEPS), equality.made(strategy, 2)
    expected = by_one_process(run, partial(alone, assigns))
    for ours in run_in_memory(by_a_rank, 2, run, made, partial(take, assigns)):
        assert difference(ours, expected) < equality.TOLERANCE
