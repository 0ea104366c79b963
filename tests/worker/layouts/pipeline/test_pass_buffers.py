"""Buffers that forward passes change: stages leave the same values as one process, or refuse."""

import functools
import threading

import pytest
import torch
from support.collectives.strategy_runs import Run, by_a_rank, by_one_process, difference
from support.models import pipeline_models as models
from support.processes.worlds import (
    Training,
    assemble,
    largest_difference,
    one_process,
    this_world,
    train_rank,
)
from support.training import equality
from torch import Tensor, nn

import shoal
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal_proto.errors import InvalidSpec

from .test_layout import TOLERANCE, in_stages

_seeded = threading.Lock()


def build(model, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    # Ranks that are threads share one random generator.
    with _seeded:
        torch.manual_seed(seed)
        made = model()
    return made, models.momentum(made.parameters())


def loader() -> Loader:
    order = Order(num_samples=30, global_batch_size=12, num_epochs=6)
    return Loader(models.numbers(), order)


def trained(model, world_size: int, *, num_steps: int = 6, **options) -> tuple[dict, dict]:
    """Return the state of stages after some steps, and that of one process."""
    done = Training(
        model=model,
        optimizer=models.momentum,
        data=models.numbers,
        loss=models.squared,
        num_steps=num_steps,
        interleaved=True,
    )
    lay_out = functools.partial(in_stages, **options)
    return assemble(shoal.run_in_memory(train_rank, world_size, done, lay_out)), one_process(done)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_power_iterations_of_weights_are_those_of_one_process(schedule: str) -> None:
    """Holds for layers that a backward pass recomputes too. Regression: the iterations were made
    once per micro-batch, and other weights were trained."""
    ours, theirs = trained(models.normalised, 2, schedule=schedule)
    assert any(name.endswith("_u") for name in ours)
    assert largest_difference(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("kind", ["passes", "passes, unseen"])
def test_passes_are_counted_once_for_a_whole_batch(kind: str) -> None:
    ours, theirs = trained(functools.partial(models.counting, kind), 2)
    assert ours["2.kept"] == 6
    assert largest_difference(ours, theirs) <= TOLERANCE


@pytest.mark.sampled()
@pytest.mark.parametrize(
    "model",
    [models.normalised, functools.partial(models.counting, "passes, in another tensor")],
    ids=["spectral norm", "count"],
)
@pytest.mark.parametrize(("strategy", "world_size"), [("pipeline", 3), ("hybrid", 4)])
def test_buffers_under_strategies_with_stages_equal_those_of_one_process(
    strategy: str, world_size: int, model
) -> None:
    run = Run(
        build=functools.partial(build, model), loader=loader, loss=models.squared, num_steps=8
    )
    theirs = by_one_process(run)
    made = equality.made(strategy, world_size)
    for ours in shoal.run_in_memory(by_a_rank, world_size, run, made):
        assert difference(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("kind", ["samples", "values"])
def test_buffers_computed_from_samples_are_refused_by_name(kind: str) -> None:
    """A count of samples would be that of one micro-batch."""
    with pytest.raises(InvalidSpec, match=r"buffers from its samples.*: 2\.kept; saw.*microbatch"):
        trained(functools.partial(models.counting, kind), 2)


@pytest.mark.parametrize("kind", ["samples", "values"])
def test_buffers_computed_from_samples_are_allowed_with_one_microbatch(kind: str) -> None:
    ours, theirs = trained(functools.partial(models.counting, kind), 2, microbatches=1)
    assert largest_difference(ours, theirs) <= TOLERANCE


def test_buffers_that_stay_as_they_are_are_copied_once() -> None:
    """An unchanged mask is not copied: a pass only checks how often the mask was written to."""

    def body() -> list[bool]:
        torch.manual_seed(0)
        layout = in_stages(models.transformer(), this_world())
        inputs, targets = models.tokens()
        copies: list[list[Tensor]] = []
        for _ in range(3):
            layout.forward_backward(inputs[:12], targets[:12], models.next_token, 1.0)
            copies.append(list(layout.stage.pass_buffers._copies))
        return [one is other for one, other in zip(copies[0], copies[-1], strict=True)]

    assert shoal.run_in_memory(body, 2) == [[True], [True]]
