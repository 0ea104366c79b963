"""A loss that is not finite ends the step before its backward pass, under every strategy that steps
together, though its gradients are finite."""

import math
from collections.abc import Callable

import pytest
from support.collectives.strategy_runs import enter
from support.training import equality

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import NonFiniteGradient


def outcome(made: Callable[[], Strategy], added: float) -> str:
    """Return a rank's error after a pass whose loss has this number added, and its steps."""
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    run = equality.run_of("sgd")
    share = enter(run, strategy).share
    batch = run.loader().synchronous(0, *share)
    strategy.begin_step()
    loss = run.loss(strategy.module(batch.inputs), batch.targets)
    error = ""
    try:
        strategy.backward(loss + added, batch.weight)
        strategy.end_step(lambda: None)
    except NonFiniteGradient as refusal:
        error = str(refusal)
    steps = strategy.step
    strategy.close()
    return f"{error.partition(' at step')[0]}, {steps} steps"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor"])
@pytest.mark.parametrize("added", [math.nan, math.inf, 1.0])
def test_no_step_with_a_loss_that_is_not_finite_is_committed(strategy: str, added: float) -> None:
    found = run_in_memory(outcome, 2, equality.made(strategy, 2), added)
    expected = ", 1 steps" if added == 1.0 else "the loss is not finite, 0 steps"
    assert found == [expected] * 2
