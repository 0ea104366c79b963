"""Layers that are trained from some step on: their gradients are dropped until then. Every strategy
trains like one process whose parameters require no gradient before."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.collectives.strategy_runs import Rank, by_a_rank, by_one_process, difference
from support.training import equality
from torch import nn
from torch.optim import Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch

TOLERANCE = 1e-5
NUM_STEPS, FROM_STEP, MAX_NORM = 24, 10, 0.1
NUM_LATE = 4
"""Parameters of the first two layers, which make up the optimizer's first group."""


def build(kind: type[Optimizer], seed: int) -> tuple[nn.Module, Optimizer]:
    model, _ = equality.build("sgd", seed)
    late, others = list(model.layers.parameters())[:NUM_LATE], []  # type: ignore[union-attr,operator]
    for parameter in model.parameters():
        if not any(parameter is each for each in late):
            others.append(parameter)
    return model, kind([{"params": late, "lr": 3e-3}, {"params": others}], lr=5e-3)  # type: ignore[call-arg]


def alone(model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.requires_grad_(batch.step >= FROM_STEP)
    optimizer.zero_grad()
    equality.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()


def take(rank: Rank, batch: Batch) -> None:
    strategy = rank.strategy
    strategy.begin_step()
    strategy.forward_backward(batch.inputs, batch.targets, equality.loss, batch.weight)
    if batch.step < FROM_STEP:
        for parameter in rank.optimizer.param_groups[0]["params"]:
            parameter.grad = None
    strategy.clip_grad_norm(MAX_NORM)
    strategy.end_step(lambda: None)


@pytest.mark.sampled()
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize(("strategy", "world_size"), equality.WORLDS)
def test_equal_to_one_process_that_freezes_them(strategy: str, world_size: int, kind: str) -> None:
    run = replace(
        equality.run_of("", num_steps=NUM_STEPS), build=partial(build, getattr(torch.optim, kind))
    )
    expected = by_one_process(run, alone)
    made = equality.made(strategy, world_size)
    for ours in run_in_memory(by_a_rank, world_size, run, made, take):
        assert difference(ours, expected) < TOLERANCE
