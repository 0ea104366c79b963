"""A mesh of stages, copies and splits, which trains to the weights of one process."""

import functools

import pytest
import torch
from support.models import pipeline_models
from support.models import tensor_models as models
from support.processes.worlds import (
    LaidOutTraining,
    Training,
    assemble,
    largest_difference,
    one_process,
    run_on_gloo,
    this_world,
    train_rank,
)
from torch import nn

import shoal
from shoal.layouts.base import Layout, World
from shoal.layouts.hybrid.layout import HybridLayout
from shoal.strategies.layout.hybrid import Hybrid

# Sums over ranks are taken in another order than in one kernel: single roundings of fp32.
TOLERANCE = 1e-5


def on_mesh(
    model: nn.Module, world: World, *, sizes: tuple[int, int, int], **options: object
) -> Layout:
    pipeline, data, tensor = sizes
    strategy = Hybrid(
        pipeline=pipeline,
        data=data,
        tensor=tensor,
        min_split_bytes=0,
        microbatches=2,
        **options,  # type: ignore[arg-type]
    )
    return strategy.lay_out(model, world)


def training(model=models.tied_gpt, optimizer=models.momentum, **options) -> Training:
    settings = {"num_steps": 4, "interleaved": True, **options}
    return Training(
        model=model, optimizer=optimizer, data=models.tokens, loss=models.next_token, **settings
    )


def check_equal(done: Training, state_shards) -> None:
    ours, theirs = assemble(state_shards), one_process(done)
    assert set(ours) == {name for name, _ in done.build()[0].named_parameters()}
    # One name of a tied parameter is enough; state_dict has both.
    theirs = {name: tensor for name, tensor in theirs.items() if name in ours}
    assert largest_difference(ours, theirs) <= TOLERANCE


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("sizes", "model", "optimizer"),
    [
        ((2, 2, 1), models.gpt, models.adamw),
        ((2, 1, 2), models.tied_gpt, models.momentum),
        ((1, 2, 2), models.tied_gpt, models.adamw),
        ((2, 2, 2), models.gpt, models.momentum),
        ((2, 2, 2), models.tied_gpt, models.adamw),
        ((2, 1, 3), models.tied_gpt, models.momentum),
        ((1, 3, 1), models.gpt, models.adamw),
        ((3, 1, 1), models.tied_gpt, models.adamw),
    ],
)
def test_equals_one_process(sizes, model, optimizer):
    done = training(model, optimizer)
    world_size = sizes[0] * sizes[1] * sizes[2]
    lay_out = functools.partial(on_mesh, sizes=sizes)
    check_equal(done, shoal.run_in_memory(train_rank, world_size, done, lay_out))


@pytest.mark.nightly
def test_eight_ranks_equal_one_process_after_fifty_steps():
    done = training(num_steps=50)
    lay_out = functools.partial(on_mesh, sizes=(2, 2, 2))
    check_equal(done, shoal.run_in_memory(train_rank, 8, done, lay_out))


@pytest.mark.long
def test_equals_one_process_over_gloo():
    done = training(num_steps=2)
    check_equal(done, run_on_gloo(4, train_rank, done, functools.partial(on_mesh, sizes=(2, 1, 2))))


def test_copies_with_shares_of_different_sizes_equal_one_process():
    """The two copies have 6 and 5 of 11 samples, and make different numbers of micro-batches."""
    done = training(batch_size=11, accumulate=2)
    lay_out = functools.partial(on_mesh, sizes=(2, 2, 1))
    check_equal(done, shoal.run_in_memory(train_rank, 4, done, lay_out))


@pytest.mark.sampled()
@pytest.mark.parametrize("sizes", [(1, 2, 2), (1, 4, 1)])
def test_with_one_stage_an_ordinary_loop_works(sizes):
    done = training(interleaved=False)
    lay_out = functools.partial(on_mesh, sizes=sizes)
    check_equal(done, shoal.run_in_memory(train_rank, 4, done, lay_out))


def laid_out(sizes: tuple[int, int, int], make=models.gpt) -> HybridLayout:
    done = Training(
        model=make, optimizer=models.momentum, data=models.tokens, loss=models.next_token
    )
    layout = LaidOutTraining(done, functools.partial(on_mesh, sizes=sizes), this_world()).layout
    assert isinstance(layout, HybridLayout)
    return layout


def test_a_gradient_is_reduced_only_in_the_group_that_shares_the_coordinate():
    """Gradients of a rank are a number of its own; the result is the mean of two copies."""

    def body() -> tuple[int, tuple[str, ...], set[float]]:
        layout = laid_out((2, 2, 1))
        rank = layout.world.rank
        for parameter in layout.parameters.values():
            parameter.grad = torch.full_like(parameter, float(10**rank))
        layout.reduce()
        values = {float(value) for p in layout.parameters.values() for value in p.grad.unique()}
        return layout.data_index, tuple(layout.parameters), values

    first, second, third, fourth = shoal.run_in_memory(body, 4)
    # Ranks 0 and 1 are copies of the first stage, 2 and 3 of the second.
    assert first[2] == second[2] == {(1 + 10) / 2}
    assert third[2] == fourth[2] == {(100 + 1000) / 2}
    assert (first[0], second[0], third[0], fourth[0]) == (0, 1, 0, 1)
    assert first[1] == second[1]
    assert third[1] == fourth[1]
    assert not set(first[1]) & set(third[1])


def test_a_gradient_that_some_copies_lack_counts_as_zero_there_and_none_stays_none():
    def body() -> list[object]:
        layout = laid_out((1, 2, 1))
        parameters = list(layout.parameters.values())[:3]
        parameters[0].grad = torch.ones_like(parameters[0])
        if layout.data_index:
            parameters[1].grad = torch.ones_like(parameters[1])
        layout.reduce()
        return [None if p.grad is None else p.grad.unique().tolist() for p in parameters]

    assert shoal.run_in_memory(body, 2) == [[[1.0], [0.5], None]] * 2


@pytest.mark.sampled()
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 2), (2, 2, 1), (2, 1, 2)])
def test_exactly_one_rank_answers_for_each_element(sizes):
    def body() -> list[tuple[str, object]]:
        layout = laid_out(sizes, models.tied_gpt)
        held = layout.held
        return [
            (name, layout.shard(name, t))
            for name, t in held.items()
            if layout.is_counted_here(name)
        ]

    world_size = sizes[0] * sizes[1] * sizes[2]
    times: dict[str, torch.Tensor] = {}
    for shards in shoal.run_in_memory(body, world_size):
        for name, shard in shards:
            counted = times.setdefault(name, torch.zeros(shard.shape))
            whole = torch.zeros(shard.shape)
            index = tuple(
                slice(start, start + size)
                for start, size in zip(shard.chunk.offsets, shard.chunk.sizes, strict=True)
            )
            whole[index] = 1
            counted += whole
    assert set(times) == {name for name, _ in models.tied_gpt().named_parameters()}
    assert all(bool((counted == 1).all()) for counted in times.values())


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1)])
def test_copies_keep_the_statistics_of_the_first_copy(sizes):
    """The statistics are those of the first copy's own samples; `assemble` fails if two ranks hold
    different ones."""
    done = Training(
        model=pipeline_models.Counted,
        optimizer=models.momentum,
        data=pipeline_models.numbers,
        loss=pipeline_models.squared,
        num_steps=3,
        interleaved=True,
    )
    lay_out = functools.partial(on_mesh, sizes=sizes)
    ours = assemble(shoal.run_in_memory(train_rank, sizes[0] * sizes[1], done, lay_out))
    microbatches = 2 if sizes[0] > 1 else 1
    assert ours["norm.num_batches_tracked"] == 3 * microbatches
    assert not torch.equal(ours["norm.running_mean"], torch.zeros(4, dtype=torch.float64))


def test_evaluation_gives_every_rank_the_outputs_of_the_whole_model():
    inputs, _ = models.tokens()

    def body() -> torch.Tensor:
        layout = laid_out((2, 1, 2))
        with torch.no_grad():
            return layout.plain(inputs)

    torch.manual_seed(0)
    model = models.gpt()
    for outputs in shoal.run_in_memory(body, 4):
        torch.testing.assert_close(outputs, model(inputs))


@pytest.mark.long
def test_a_pair_that_is_split_may_stand_in_two_stages():
    """Stages then exchange each rank's part of the values."""
    done = Training(
        model=pipeline_models.perceptron,
        optimizer=models.momentum,
        data=pipeline_models.numbers,
        loss=pipeline_models.squared,
        num_steps=4,
        interleaved=True,
    )
    lay_out = functools.partial(on_mesh, sizes=(4, 1, 2))
    check_equal(done, shoal.run_in_memory(train_rank, 8, done, lay_out))
