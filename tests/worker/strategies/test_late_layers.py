"""Layers that are trained from some step on: their gradients are dropped until then. Every strategy
trains like one process whose parameters require no gradient before."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import Run, difference, entered
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy

from . import test_equality as equality

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


def run_of(kind: type[Optimizer]) -> Run:
    return Run(build=lambda seed: build(kind, seed), loader=equality.loader, loss=equality.loss)


def by_one_process(run: Run) -> dict[str, Tensor]:
    model, optimizer = run.build(0)
    loader = run.loader()
    for step in range(NUM_STEPS):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.requires_grad_(step >= FROM_STEP)
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        run.loss(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return dict(model.state_dict())


def by_a_rank(run: Run, made: Callable[[], Strategy]) -> dict[str, Tensor]:
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    model, optimizer = run.build(dist.get_rank())
    share = entered(replace(run, build=lambda _: (model, optimizer)), strategy)
    loader = run.loader()
    for step in range(NUM_STEPS):
        batch = loader.synchronous(step, *share)
        strategy.begin_step()
        strategy.forward_backward(batch.inputs, batch.targets, run.loss, batch.weight)
        if step < FROM_STEP:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = None
        strategy.clip_grad_norm(MAX_NORM)
        strategy.end_step(lambda: None)
    strategy.finish()
    weights = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
    strategy.close()
    return weights


@pytest.mark.sampled()
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize(("strategy", "world_size"), equality.WORLDS)
def test_equal_to_one_process_that_freezes_them(strategy: str, world_size: int, kind: str) -> None:
    run = run_of(getattr(torch.optim, kind))
    expected = by_one_process(run)
    for ours in run_in_memory(by_a_rank, world_size, run, equality.made(strategy, world_size)):
        assert difference(ours, expected) < TOLERANCE
