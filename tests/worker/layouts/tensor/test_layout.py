"""A model split over ranks, which trains to the weights of one process."""

import copy
from typing import Any

import pytest
import torch
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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shoal
from shoal import randomness
from shoal.layouts.base import Layout, World
from shoal.layouts.tensor.derivation import derive
from shoal.layouts.tensor.layer_group import TensorGroup
from shoal.layouts.tensor.layout import TensorLayout, parallelise
from shoal.layouts.tensor.plan import TensorPlan
from shoal.randomness.dropout import key_dropout
from shoal.state.shards import StateShard

# Sums over ranks are taken in another order than in one kernel: single roundings of fp32.
TOLERANCE = 1e-5
DATA = {
    models.mlp: (models.numbers, models.squared),
    models.uneven_mlp: (models.numbers, models.squared),
    models.residual: (models.numbers, models.squared),
    models.encoder_layer: (models.sequences, models.squared),
    models.decoder: (models.sequences, models.squared),
    models.dropping_encoder: (models.sequences, models.squared),
    models.gpt: (models.tokens, models.next_token),
    models.tied_gpt: (models.tokens, models.next_token),
    models.declared: (models.tokens, models.next_token),
}


def training(model, optimizer, **options) -> Training:
    data, loss = DATA[model]
    return Training(model=model, optimizer=optimizer, data=data, loss=loss, num_steps=4, **options)


def split(model: nn.Module, world: World) -> Layout:
    return TensorLayout(model, world, derive(model, world.world_size, min_split_bytes=0))


def split_otherwise(model: nn.Module, world: World) -> Layout:
    chosen = {"0": "row", "3": "column", "5": "row"}
    return TensorLayout(model, world, derive(model, world.world_size, chosen))


def check_equal(done: Training, state_shards: list[StateShard]) -> None:
    ours, theirs = assemble(state_shards), one_process(done)
    # One name of a tied parameter is enough; state_dict has both.
    theirs = {name: tensor for name, tensor in theirs.items() if name in ours}
    assert set(ours) == {name for name, _ in done.build()[0].named_parameters()}
    assert largest_difference(ours, theirs) <= TOLERANCE


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("world_size", "optimizer"), [(2, models.adamw), (3, models.momentum), (4, models.adamw)]
)
@pytest.mark.parametrize(
    "model",
    [
        models.mlp,
        models.uneven_mlp,
        models.residual,
        models.encoder_layer,
        models.decoder,
        models.gpt,
        models.tied_gpt,
        models.declared,
    ],
)
def test_equals_one_process(model, world_size, optimizer):
    """50 steps are in `test_equality` of the strategies."""
    done = training(model, optimizer)
    check_equal(done, shoal.run_in_memory(train_rank, world_size, done, split))


@pytest.mark.sampled()
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_add_up_over_backward_passes(world_size):
    done = training(models.gpt, models.momentum, accumulate=3)
    check_equal(done, shoal.run_in_memory(train_rank, world_size, done, split))


@pytest.mark.sampled()
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_split_that_the_user_chose_equals_one_process(world_size):
    done = training(models.mlp, models.adamw)
    check_equal(done, shoal.run_in_memory(train_rank, world_size, done, split_otherwise))


@pytest.mark.long
def test_equals_one_process_over_gloo():
    done = training(models.tied_gpt, models.adamw)
    check_equal(done, run_on_gloo(2, train_rank, done, split))


def test_dropout_draws_the_masks_of_one_process():
    done = training(models.dropping_encoder, models.momentum)
    check_equal(done, run_on_gloo(2, train_rank, done, split))


def held_bytes(done: Training) -> tuple[int, int, TensorPlan]:
    """Return the bytes that this rank holds, the bytes for which it answers, and the plan."""
    layout = LaidOutTraining(done, split, this_world()).layout
    assert isinstance(layout, TensorLayout)
    sizes = {n: layout.shard(n, p).tensor.nbytes for n, p in layout.parameters.items()}
    counted = sum(size for name, size in sizes.items() if layout.is_counted_here(name))
    return sum(sizes.values()), counted, layout.plan


@pytest.mark.sampled("model", "world_size")
@pytest.mark.parametrize("model", DATA)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_hold_the_bytes_that_the_plan_says(model, world_size):
    done = training(model, models.adamw)
    whole = sum(parameter.nbytes for parameter in model().parameters())
    found = shoal.run_in_memory(held_bytes, world_size, done)
    for rank, (held, _, plan) in enumerate(found):
        assert held == plan.bytes_per_rank[rank] < whole
        assert f"of {whole} bytes" in str(plan)
    assert sum(counted for _, counted, _ in found) == whole, "one rank answers for each byte"


def attend(whole: nn.MultiheadAttention, options: dict[str, Any]) -> None:
    """Compare outputs, weights and input gradients of split attention with those of whole
    attention."""
    parts = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(this_world().group, "cpu")
    ranks = TensorGroup(this_world().group, torch.device("cpu"))
    parallelise(parts, mesh, derive(parts, mesh.size(), min_split_bytes=0), ranks)
    query, key, value = options.pop("inputs")
    for shown in (True, False):
        results = []
        for module in (whole, parts):
            given = query.clone().requires_grad_()
            same = key is query
            out, weights = module(
                given,
                given if same else key,
                given if same else value,
                need_weights=shown,
                **options,
            )
            (gradient,) = torch.autograd.grad(out.square().sum(), given)
            results.append((out, gradient, weights if shown else out))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("case", ["self", "cross", "masked", "mask of each head", "no batch"])
def test_split_attention_computes_what_whole_attention_does(case, batch_first):
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(12, 4, batch_first=batch_first)
    first, source = torch.randn(3, 5, 12), torch.randn(3, 6, 12)
    options: dict[str, Any] = {"inputs": (first, first, first)}
    num_samples, num_positions = (3, 5) if batch_first else (5, 3)
    if case == "cross":
        source = source if batch_first else torch.randn(6, 5, 12)
        options = {"inputs": (first, source, source.clone()), "average_attn_weights": False}
    elif case == "masked":
        options["attn_mask"] = torch.ones(num_positions, num_positions, dtype=torch.bool).triu(1)
        options["is_causal"] = True
        padding = torch.zeros(num_samples, num_positions, dtype=torch.bool)
        padding[0, -1] = True
        options["key_padding_mask"] = padding
    elif case == "mask of each head":
        options["attn_mask"] = torch.randn(4 * num_samples, num_positions, num_positions)
    elif case == "no batch":
        options["inputs"] = (first[0], first[0], first[0])
    shoal.run_in_memory(lambda: attend(whole, dict(options)), 2)


def test_split_attention_needs_the_mask_that_it_is_told_of():
    """Whole attention needs it too: `is_causal` alone would not hide later positions."""
    inputs = torch.randn(3, 5, 12)
    whole = nn.MultiheadAttention(12, 4, batch_first=True)

    def body() -> None:
        parts = copy.deepcopy(whole)
        mesh = DeviceMesh.from_group(this_world().group, "cpu")
        ranks = TensorGroup(this_world().group, torch.device("cpu"))
        parallelise(parts, mesh, derive(parts, mesh.size(), min_split_bytes=0), ranks)
        for attention in (whole, parts):
            with pytest.raises(RuntimeError, match="attn_mask"):
                attention(inputs, inputs, inputs, is_causal=True)

    shoal.run_in_memory(body, 2)


def evaluate(whole: nn.Module, inputs: Tensor, padding: Tensor) -> Tensor:
    parts = copy.deepcopy(whole).eval()
    mesh = DeviceMesh.from_group(this_world().group, "cpu")
    ranks = TensorGroup(this_world().group, torch.device("cpu"))
    parallelise(parts, mesh, derive(parts, mesh.size(), min_split_bytes=0), ranks)
    with torch.no_grad():
        out: Tensor = parts(inputs, src_key_padding_mask=padding)
        return out


def test_evaluation_avoids_kernels_that_need_whole_weights():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, dim_feedforward=16, batch_first=True)
    whole = nn.TransformerEncoder(layer, 2).eval()
    inputs = torch.randn(3, 5, 12)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    expected = whole(inputs, src_key_padding_mask=padding)
    for given in shoal.run_in_memory(evaluate, 2, whole, inputs, padding):
        torch.testing.assert_close(given[~padding], expected[~padding])


def look_up(whole: nn.Module, index: int) -> None:
    parts = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(this_world().group, "cpu")
    plan = derive(parts, mesh.size(), min_split_bytes=0)
    parallelise(parts, mesh, plan, TensorGroup(this_world().group, torch.device("cpu")))
    assert plan.entry("0").style == "vocab"
    parts(torch.tensor([[0, 5]]))
    with pytest.raises(IndexError, match="out of range"):
        parts(torch.tensor([[0, index]]))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("index", [6, -1])
def test_a_split_embedding_refuses_an_index_that_is_out_of_range(world_size, index):
    """Every rank refuses it, as torch does in one process: with four ranks the last has no row."""
    whole = nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 3))
    shoal.run_in_memory(look_up, world_size, whole, index)


def answer(whole: nn.Module, inputs: Tensor) -> Tensor:
    parts = copy.deepcopy(whole)
    mesh = DeviceMesh.from_group(this_world().group, "cpu")
    plan = derive(parts, mesh.size(), min_split_bytes=0)
    parallelise(parts, mesh, plan, TensorGroup(this_world().group, torch.device("cpu")))
    assert plan.entry("1").style == "mask"
    with randomness.at(seed=1, step=2, first=0, count=len(inputs)):
        out: Tensor = parts(inputs).detach()
        return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_keyed_dropout_within_a_pair_draws_the_masks_of_one_process(world_size):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 10), nn.Dropout(0.5), nn.Linear(10, 3), nn.Dropout(0.5))
    assert key_dropout(whole) == 2
    inputs = torch.randn(6, 4)
    with randomness.at(seed=1, step=2, first=0, count=6):
        expected = whole(inputs).detach()
    for given in shoal.run_in_memory(answer, world_size, whole, inputs):
        torch.testing.assert_close(given, expected)


def travelling(done: Training) -> set[str]:
    layout = LaidOutTraining(done, split, this_world()).layout
    names = [f"model.{name}" for name in layout.held]
    names += [f"optim.{name}/exp_avg" for name in layout.parameters]
    return {name for name in names if layout.is_lost_with_rank(name)}


def test_only_split_parameters_are_lost_with_a_rank():
    done = training(models.encoder_layer, models.adamw)
    cut = {"linear1.weight", "linear1.bias", "linear2.weight", "self_attn.in_proj_weight"}
    cut |= {"self_attn.in_proj_bias", "self_attn.out_proj.weight"}
    for found in shoal.run_in_memory(travelling, 2, done):
        assert found == {f"model.{n}" for n in cut} | {f"optim.{n}/exp_avg" for n in cut}
