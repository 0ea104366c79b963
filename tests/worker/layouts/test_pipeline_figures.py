"""What a plan of a pipeline says beforehand is what its members then hold and send."""

import functools

import pipeline_models as models
import pytest
import torch
import torch.distributed as dist
from worlds import LaidOutTraining, Training

import shoal
from shoal.backends.collectives import counts, reset_counts
from shoal.layouts.base import World
from shoal.planning.figures import Subject
from shoal.strategies.pipeline import Pipeline

BATCH = 12


def training(model, optimizer) -> Training:
    data, loss = {
        models.perceptron: (models.numbers, models.squared),
        models.tied_transformer: (models.tokens, models.next_token),
    }[model]
    return Training(
        model=model,
        optimizer=optimizer,
        data=data,
        loss=loss,
        batch_size=BATCH,
        interleaved=True,
    )


def measured(done: Training, microbatches: int) -> dict[str, object]:
    """Bytes that a rank holds after a step, and what the next step moves."""
    group = dist.group.WORLD
    assert group is not None
    world = World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=torch.device("cpu"),
        group=group,
    )
    trained = LaidOutTraining(done, Pipeline(microbatches=microbatches).lay_out, world)
    trained.step(0)
    reset_counts()
    trained.step(1)
    parameters = trained.layout.parameters.values()
    state = trained.bound.optimizer.state
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(
            value.nbytes
            for parameter in parameters
            for value in state[parameter].values()
            if isinstance(value, torch.Tensor)
        ),
        "moved": {kind: tuple(count) for kind, count in counts().items() if count.bytes},
    }


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("optimizer", [models.momentum, models.adamw])
@pytest.mark.parametrize("model", [models.perceptron, models.tied_transformer])
def test_figures_are_those_of_a_run(model, optimizer, microbatches):
    done = training(model, optimizer)
    whole, its_optimizer = done.build()
    subject = Subject(model=whole, world_size=3, optimizer=its_optimizer, inputs=done.batch(0)[0])
    plan = Pipeline(microbatches=microbatches).figures(subject)
    ranks = shoal.run_in_memory(functools.partial(measured, done, microbatches), 3)
    for rank, found in enumerate(ranks):
        figures = plan.ranks[rank]
        assert figures.parameters == found["parameters"]
        assert figures.gradients == found["gradients"]
        assert figures.optimizer == found["optimizer"]
        kinds = {each.kind for each in figures.collectives}
        assert {kind: plan.moved(kind, rank) for kind in kinds} == found["moved"]
    assert all(not parameter.is_meta for parameter in whole.parameters())


def test_the_plan_names_the_layers_of_each_stage():
    subject = Subject(model=models.perceptron(), world_size=3)
    shown = str(Pipeline().figures(subject))
    assert "stage 0: 0.0" in shown
    assert "stage 2: 1 to 3" in shown
    assert "without inputs" in shown
    timed = Pipeline(balance="time", example=torch.zeros(2, 5)).figures(subject)
    assert "those of a run are by measured time" in str(timed)
