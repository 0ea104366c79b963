"""Plans of stages, splits and meshes predict what ranks then hold and move."""

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.models import pipeline_models, sharded_models, tensor_models
from support.processes.worlds import LaidOutTraining, Training, this_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shoal
from shoal.backends.process_group.collectives import Count, counts, reset_counts
from shoal.planning.figures import Plan
from shoal.strategies.layout.hybrid import Hybrid
from shoal.strategies.layout.pipeline import Pipeline
from shoal.strategies.layout.sharded import ShardedStrategy
from shoal.strategies.layout.tensor import TensorParallel
from shoal_proto.errors import InvalidSpec

DATA = {
    pipeline_models.perceptron: (pipeline_models.numbers, pipeline_models.squared),
    sharded_models.normed: (sharded_models.data, nn.functional.mse_loss),
    pipeline_models.tied_transformer: (pipeline_models.tokens, pipeline_models.next_token),
    tensor_models.mlp: (tensor_models.numbers, tensor_models.squared),
    tensor_models.uneven_mlp: (tensor_models.numbers, tensor_models.squared),
    tensor_models.gpt: (tensor_models.tokens, tensor_models.next_token),
    tensor_models.tied_gpt: (tensor_models.tokens, tensor_models.next_token),
    tensor_models.encoder_layer: (tensor_models.sequences, tensor_models.squared),
    tensor_models.decoder: (tensor_models.sequences, tensor_models.squared),
}


def training(model, optimizer=pipeline_models.adamw, batch_size=12) -> Training:
    data, loss = DATA[model]
    return Training(
        model=model,
        optimizer=optimizer,
        data=data,
        loss=loss,
        batch_size=batch_size,
        interleaved=True,
    )


def memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of the tensors, each counted once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def measured(done: Training, strategy: ShardedStrategy) -> dict[str, Any]:
    """Return the bytes that a rank holds when the optimizer steps, and the bytes that this step
    moves."""
    world = this_world()
    trained = LaidOutTraining(done, strategy.lay_out, world)
    trained.step(0)
    held: dict[str, Any] = {}

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = trained.layout.parameters.values()
        state = [v for own in optimizer.state.values() for v in own.values()]
        held["parameters"] = memory(trained.layout.plain.parameters())
        held["gradients"] = memory(p.grad for p in parameters if p.grad is not None)
        held["optimizer"] = memory(v for v in state if isinstance(v, Tensor))

    trained.binding.optimizer.register_step_pre_hook(look)
    reset_counts()
    trained.step(1)
    moved = counts()
    if trained.layout.faults_are_own:
        # Here the faults have a message of their own; in a session they go with the vote on the
        # step.
        calls, num_bytes = moved["all_reduce"]
        message = world.world_size * torch.float32.itemsize
        moved = moved | {"all_reduce": Count(calls - 1, num_bytes - message)}
    return held | {"moved": {kind: tuple(c) for kind, c in moved.items() if c.bytes}}


def check(done: Training, strategy: ShardedStrategy, world_size: int) -> Plan:
    whole, optimizer = done.build()
    plan = shoal.plan(
        whole, strategy, world_size=world_size, optimizer=optimizer, inputs=done.batch(1)[0]
    )
    ranks = shoal.run_in_memory(functools.partial(measured, done, strategy), world_size)
    for rank, (figures, found) in enumerate(zip(plan.ranks, ranks, strict=True)):
        kinds = {each.kind for each in figures.collectives}
        assert found == {
            "parameters": figures.parameters,
            "gradients": figures.gradients,
            "optimizer": figures.optimizer,
            "moved": {kind: plan.moved(kind, rank) for kind in kinds},
        }
        assert figures.peak == figures.held == sum(v for v in found.values() if isinstance(v, int))
    assert all(not parameter.is_meta for parameter in whole.parameters())
    return plan


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("optimizer", [pipeline_models.momentum, pipeline_models.adamw])
@pytest.mark.parametrize("model", [pipeline_models.perceptron, pipeline_models.tied_transformer])
def test_figures_of_stages(model, optimizer, microbatches):
    check(training(model, optimizer), Pipeline(microbatches=microbatches), 3)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("model", "world_size"),
    [
        (tensor_models.mlp, 2),
        (tensor_models.uneven_mlp, 3),
        (tensor_models.gpt, 2),
        (tensor_models.tied_gpt, 3),
        (tensor_models.encoder_layer, 2),
        (tensor_models.decoder, 3),
    ],
)
def test_figures_of_splits(model, world_size):
    """The plan's figures hold for pairs, single modules, embeddings and attention, with indivisible
    sizes."""
    check(training(model), TensorParallel(min_split_bytes=0), world_size)


def test_figures_of_splits_that_the_user_chose():
    strategy = TensorParallel({"0": "row", "3": "column", "5": "whole"}, min_split_bytes=0)
    check(training(tensor_models.mlp), strategy, 2)


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("sizes", "model"),
    [
        ((2, 2, 1), tensor_models.gpt),
        ((2, 1, 2), tensor_models.tied_gpt),
        ((1, 2, 2), tensor_models.tied_gpt),
        ((1, 3, 1), tensor_models.gpt),
        ((2, 2, 2), tensor_models.tied_gpt),
        ((2, 2, 1), sharded_models.normed),
        ((4, 1, 2), pipeline_models.perceptron),
    ],
)
def test_figures_of_meshes(sizes, model):
    """Shares have unequal sizes, which also make different numbers of micro-batches."""
    pipeline, data, tensor = sizes
    strategy = Hybrid(
        pipeline=pipeline, data=data, tensor=tensor, min_split_bytes=0, microbatches=2
    )
    plan = check(training(model, batch_size=11), strategy, pipeline * data * tensor)
    assert (
        str(plan)
        .splitlines()[0]
        .endswith(f"{pipeline} x {data} x {tensor} (pipeline x data x tensor)")
    )


def test_the_plan_names_the_layers_of_each_stage():
    model = pipeline_models.perceptron()
    shown = str(shoal.plan(model, "pipeline", world_size=3))
    assert "stage 0: 0.0" in shown
    assert "stage 2: 1 to 3" in shown
    assert "without inputs" in shown
    timed = Pipeline(balance="time", example=torch.zeros(2, 5))
    assert "in a run they are balanced by measured time" in str(
        shoal.plan(model, timed, world_size=3)
    )


def test_a_plan_without_inputs_lists_its_omissions():
    model = tensor_models.gpt()
    for strategy in (TensorParallel(min_split_bytes=0), Hybrid(tensor=2, min_split_bytes=0)):
        plan = shoal.plan(model, strategy, world_size=2)
        assert any("without inputs" in note for note in plan.notes)
        assert {each.when for each in plan.ranks[0].collectives} == {"update"}


def test_inputs_that_the_model_does_not_take_are_refused():
    strategy = TensorParallel(min_split_bytes=0)
    with pytest.raises(InvalidSpec, match="cannot be computed beforehand"):
        shoal.plan(tensor_models.mlp(), strategy, world_size=2, inputs=torch.zeros(3, 7))
