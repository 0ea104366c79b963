"""A Keras model trained over ranks gets the weights that it gets in one process."""

from itertools import chain

from support.frameworks import keras_ranks  # before keras: sets its backend

import keras  # isort: skip
import pytest
import torch
from support.processes.worlds import (
    assemble,
    largest_difference,
    one_process,
    run_on_gloo,
    train_rank,
)
from torch import Tensor

import shoal
from shoal.integrations.keras import KerasModule, distribute
from shoal.layouts.base import Layout, World
from shoal.model.frameworks import as_torch
from shoal.strategies import find_strategy
from shoal_proto.errors import InvalidSpec, UnknownStrategy, UnsupportedOptimizer

TOLERANCE = 1e-5  # fp32: ranks' sums are taken in another order
OPTIMIZERS = ["sgd", "adamw", "clipped", "accumulating"]


def test_trained_values_are_written_back_into_the_keras_model():
    module = KerasModule(keras_ranks.dense_model())
    trained = {name: value + 1 for name, value in module.state_dict().items()}
    module.give_back(trained)
    given = [variable.value for variable in module.keras_model.trainable_variables]
    assert all(
        torch.equal(value, trained[name])
        for (name, _), value in zip(module.named_parameters(), given, strict=True)
    )


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of two states; seeds and counters, which are whole numbers, are compared
    too."""
    return largest_difference(ours, theirs)


@pytest.mark.long
def test_fit_equals_one_process_and_ranks_hold_parts():
    found = run_on_gloo(2, keras_ranks.fit_each, OPTIMIZERS)
    for name in OPTIMIZERS:
        alone = keras_ranks.fit_alone(name)
        for rank in found:
            (weights, state, whole), *split = rank[name]
            assert worst(weights, alone) <= TOLERANCE
            # SGD: momentum. Adam: mean and square. Accumulating: also the sum of gradients. Two
            # more numbers are the step and the learning rate.
            kinds = {"sgd": 1, "adamw": 2, "clipped": 2, "accumulating": 3}[name]
            assert state - 2 == kinds * sum(-(-size // 2) for size in (42, 7, 35, 5, 15, 3))
            for split_weights, held, _ in split:
                assert worst(split_weights, alone) <= TOLERANCE
                assert held < whole
        if name != "clipped":
            biases = 5  # of the layer split by rows: whole on both ranks
            assert sum(rank[name][1][1] for rank in found) == found[0][name][1][2] + biases


@pytest.mark.long
def test_a_loop_of_the_scripts_own_over_three_ranks_equals_one_process():
    alone = keras_ranks.own_loop_alone()
    for weights in run_on_gloo(3, keras_ranks.own_loop):
        assert worst(weights, alone) <= TOLERANCE


@pytest.mark.long
def test_a_torch_loop_over_two_ranks_equals_one_process():
    alone = keras_ranks.torch_loop_alone()
    for weights in run_on_gloo(2, keras_ranks.torch_loop, "zero2"):
        assert worst(weights, alone) <= TOLERANCE


def test_a_keras_model_is_a_torch_module_with_the_same_parameters():
    model = keras_ranks.compiled("sgd")
    found = as_torch(model)
    assert isinstance(found, KerasModule)
    assert {id(p) for p in found.parameters()} == {id(p) for p in model.parameters()}
    plain = torch.nn.Linear(2, 2)
    assert as_torch(plain) is plain


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_sample_is_in_one_batch_of_one_rank_an_epoch(world_size):
    ranks = shoal.run_in_memory(keras_ranks.shares_of_epochs, world_size)
    orders = []
    for epoch in range(2):
        shares = zip(*(rank[epoch] for rank in ranks), strict=True)
        batches = [list(chain(*parts)) for parts in shares]
        orders.append(list(chain(*batches)))
        assert sorted(orders[-1]) == list(range(keras_ranks.NUM_SAMPLES))
        assert [len(batch) for batch in batches] == [8, 8, 5]
    assert orders[0] != orders[1]


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_a_keras_module_under_sharded_strategies_equals_one_process(strategy):
    done = keras_ranks.training()

    def lay_out(model: torch.nn.Module, world: World) -> Layout:
        return find_strategy(strategy).lay_out(model, world)  # type: ignore[attr-defined]

    ours = assemble(shoal.run_in_memory(train_rank, 2, done, lay_out))
    assert largest_difference(ours, one_process(done)) <= TOLERANCE


@pytest.mark.long
def test_the_layers_of_a_keras_module_are_split():
    """Sizes are not divisible by three ranks, which are processes."""
    done = keras_ranks.training()
    ranks = run_on_gloo(3, train_rank, done, keras_ranks.split)
    assert largest_difference(assemble(ranks), one_process(done)) <= TOLERANCE
    for rank in ranks:
        kernels = {
            name: shard.chunk.sizes
            for name, shard in rank.shards.items()
            if name.endswith("kernel")
        }
        assert len(kernels) == 3
        assert all(
            shard.chunk.sizes != shard.shape
            for name, shard in rank.shards.items()
            if name in kernels
        )


@pytest.mark.long
def test_a_layer_that_is_shared_by_a_pair_and_another_caller_gives_both_all_columns():
    alone = keras_ranks.outputs_alone()
    for outputs in run_on_gloo(2, keras_ranks.outputs_of_split):
        assert (outputs - alone).abs().max() <= TOLERANCE


def test_keras_models_that_cannot_be_distributed_are_refused():
    with pytest.raises(InvalidSpec, match="built=True compiled=False"):
        distribute(keras_ranks.dense_model())
    with pytest.raises(UnknownStrategy, match="'zero2' or 'tensor'"):
        distribute(keras_ranks.compiled("sgd"), "pipeline")
    summed = keras_ranks.compiled("sgd")
    summed.compile(optimizer="sgd", loss=keras.losses.MeanSquaredError(reduction="sum"))
    with pytest.raises(InvalidSpec, match="reduction='sum'"):
        distribute(summed)
    trained = keras_ranks.compiled("sgd")
    trained.optimizer.build(trained.trainable_variables)
    with pytest.raises(InvalidSpec, match="has state already"):
        distribute(trained)
    with pytest.raises(InvalidSpec, match="not built"):
        KerasModule(keras.Sequential([keras.layers.Dense(2)]))


def test_a_plan_of_a_keras_model_is_that_of_its_weights():
    model = keras_ranks.compiled("sgd")
    plan = shoal.plan(model, "zero2", world_size=2)
    assert sum(group.num_bytes for group in plan.groups) == 4 * model.count_params()
    with pytest.raises(InvalidSpec, match="Plan without an optimizer"):
        shoal.plan(model, "zero2", world_size=2, optimizer=model.optimizer)
    with pytest.raises(InvalidSpec, match="splits its layers itself"):
        shoal.plan(model, "tensor", world_size=2)


def refused(optimizer_name: str, strategy: str) -> str:
    model = keras_ranks.dense_model()
    kind = getattr(keras.optimizers, optimizer_name)
    clipped = {"clipnorm": 1.0} if strategy == "tensor" else {}
    model.compile(optimizer=kind(**clipped), loss="mse")
    with pytest.raises(UnsupportedOptimizer) as caught:
        distribute(model, strategy)
    return str(caught.value)


def test_optimizers_that_need_whole_weights_are_refused():
    assert "Lamb" in shoal.run_in_memory(refused, 1, "Lamb", "zero2")[0]
    assert "clipnorm" in shoal.run_in_memory(refused, 1, "Adam", "tensor")[0]
