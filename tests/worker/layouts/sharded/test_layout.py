"""Parameters cut by rows: weights equal those of one process, and each rank holds only its rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models.sharded_models import (
    Discarding,
    PartlyFrozen,
    Sometimes,
    Tangled,
    Tied,
    adamw,
    data,
    deep,
    lay_out,
    normed,
    sgd,
    training_of,
    transformer,
)
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
from torch.distributed.tensor import DTensor

from shoal.backends.in_memory.run import run_in_memory
from shoal.backends.process_group.collectives import counts, reset_counts
from shoal.layouts.base import LayOut
from shoal.layouts.buffers import broadcast_packed
from shoal.layouts.sharded.group_passes import GroupPasses
from shoal.layouts.sharded.layout import ShardedLayout

TOLERANCE = 1e-5
"""Limit for fp32; only the order of additions differs."""
ZERO2, ZERO3 = {"free_after_forward": False}, {"free_after_forward": True}
KINDS = pytest.mark.parametrize("kind", [ZERO2, ZERO3], ids=["zero2", "fsdp"])


def difference(training: Training, world_size: int, way: LayOut) -> float:
    ours = assemble(run_in_memory(train_rank, world_size, training, way))
    theirs = one_process(training)
    # A layout holds a tied parameter once; a state_dict has it under each of its names.
    return largest_difference(ours, {name: theirs[name] for name in ours})


@pytest.mark.long
@pytest.mark.sampled()
@KINDS
@pytest.mark.parametrize(("world_size", "optimizer"), [(3, sgd), (4, adamw)])
def test_equal_to_one_process(world_size: int, optimizer: Any, kind: Any) -> None:
    """The model has several groups. Its sizes are not divisible by the number of ranks, and one
    layer has fewer rows than there are ranks. 50 steps are in `test_equality` of the strategies."""
    training = training_of(deep, optimizer, num_steps=12)
    assert difference(training, world_size, lay_out(min_group_bytes=300, **kind)) < TOLERANCE


@pytest.mark.sampled()
@KINDS
def test_equal_to_one_process_on_gloo(kind: Any) -> None:
    training = training_of(deep, sgd)
    state_shards = run_on_gloo(3, train_rank, training, lay_out(min_group_bytes=150, **kind))
    assert largest_difference(assemble(state_shards), one_process(training)) < TOLERANCE


# The warning is about operations in place, of which there are none.
@pytest.mark.sampled()
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@KINDS
@pytest.mark.parametrize("model", [Tangled, Discarding, Tied, PartlyFrozen, Sometimes, transformer])
def test_models_that_are_hard_to_cut_equal_one_process(
    model: Callable[[], nn.Module], kind: Any
) -> None:
    """SGD is used for all: the gradient of a transformer's key biases is zero except for rounding,
    and Adam would make whole steps of that."""
    training = training_of(model, sgd, accumulate=2, num_steps=6)
    assert difference(training, 3, lay_out(min_group_bytes=300, **kind)) < TOLERANCE


def test_weights_are_not_freed_while_backward_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a group gathered its weights in backward only when the last of its modules began
    there."""

    def as_torch_has_it(passes: GroupPasses, modules: list[nn.Module]) -> None:
        passes._num_open, passes._blind = 0, False

    training, way = training_of(Discarding, sgd), lay_out(min_group_bytes=672)
    assert difference(training, 2, way) < TOLERANCE
    monkeypatch.setattr(GroupPasses, "__init__", as_torch_has_it)
    with pytest.raises(RuntimeError, match="storage"):
        difference(training, 2, way)


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_stays_near_full_precision(dtype: torch.dtype) -> None:
    """bf16 has 8 bits: a layer's output is off by up to 2^-9 of its size, that of five layers by
    1e-2. SGD moves a weight by the rate times such a gradient, ten times. fp16 is eight times as
    fine."""
    training = training_of(deep, sgd)
    way = lay_out(min_group_bytes=150, param_dtype=dtype, reduce_dtype=torch.float32)
    apart = difference(training, 3, way)
    assert 0 < apart < 10 * 0.05 * 1e-2


def buffers_after(training: Training, way: LayOut) -> dict[str, Tensor]:
    trained = LaidOutTraining(training, way, this_world())
    trained.run()
    return {name: b.clone() for name, b in trained.layout.module.named_buffers()}


def test_running_means_are_the_first_ranks_on_all_ranks() -> None:
    training = training_of(normed, sgd, num_steps=3)
    first, *others = run_in_memory(buffers_after, 3, training, lay_out())
    assert int(first["1.num_batches_tracked"]) == 3
    for each in others:
        assert all(torch.equal(each[name], first[name]) for name in first)


def broadcast_once() -> tuple[int, list[Tensor]]:
    rank = dist.get_rank()
    tensors = [
        torch.tensor([rank == 0, False, True]),
        torch.tensor(7 + rank),
        torch.full((2, 3), 0.5 + rank, dtype=torch.float64).t(),
        torch.empty(0),
    ]
    reset_counts()
    broadcast_packed(tensors, this_world().group)
    return counts()["broadcast"].calls, tensors


def test_buffers_of_all_dtypes_travel_in_one_broadcast() -> None:
    for calls, (flags, number, transposed, empty) in run_in_memory(broadcast_once, 2):
        assert calls == 1
        assert flags.tolist() == [True, False, True]
        assert number.item() == 7
        assert transposed.tolist() == [[0.5, 0.5]] * 3
        assert not empty.numel()


def local_gradients(training: Training, way: LayOut) -> tuple[int, int, int]:
    """Count elements of this rank's gradients, of the memory that they occupy, and of the whole
    model."""
    trained = LaidOutTraining(training, way, this_world())
    trained.step(0)
    gradients = [parameter.grad for parameter in trained.layout.parameters.values()]
    assert all(isinstance(gradient, DTensor) for gradient in gradients)
    own = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    memory = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() // 4 for g in own}
    whole = sum(parameter.numel() for parameter in trained.layout.parameters.values())
    assert all(
        getattr(part, "_unsharded_param").grad is None  # noqa: B009 - torch's own, without a type
        for part in trained.layout.fsdp_parameters  # type: ignore[attr-defined]
    )
    return sum(g.numel() for g in own), sum(memory.values()), whole


def even() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@KINDS
def test_each_rank_holds_only_its_part_of_the_gradients(kind: Any) -> None:
    """Regression: gradients of "ZeRO-2" were whole on every rank."""
    found = run_in_memory(local_gradients, 2, training_of(even), lay_out(**kind))
    for elements, memory, whole in found:
        assert elements == memory == whole // 2


@pytest.mark.long
@pytest.mark.sampled()
@KINDS
def test_gradients_of_uneven_sizes_are_scattered_without_padding(kind: Any) -> None:
    """Regression for sizes that are not divisible, with ranks that hold no rows of some
    parameters."""
    training = training_of(deep, num_steps=1)
    found = run_in_memory(local_gradients, 4, training, lay_out(**kind))
    _, _, whole = found[0]
    assert sum(elements for elements, _, _ in found) == whole
    assert difference(training, 4, lay_out(**kind)) < TOLERANCE


def reduced_and_used(training: Training, way: LayOut) -> float:
    """Return the largest difference between the step taken and an SGD step computed from the
    reduced gradients."""
    trained = LaidOutTraining(training, way, this_world())
    before = {n: p.detach().clone() for n, p in trained.layout.parameters.items()}
    trained.step(0)
    off = 0.0
    for name, parameter in trained.layout.parameters.items():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        start = before[name]
        assert isinstance(start, DTensor)
        stepped = start.to_local() - 0.1 * parameter.grad.to_local()
        off = max([off, *(stepped - parameter.to_local()).abs().flatten().tolist()])
    return off


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.sampled()
@KINDS
def test_the_optimizer_steps_with_the_reduced_gradients(kind: Any) -> None:
    """Regression: the optimizer stepped with the rank's own gradients."""
    training = training_of(deep, plain_sgd, num_steps=1)
    assert max(run_in_memory(reduced_and_used, 3, training, lay_out(**kind))) < 1e-7
    assert difference(training, 3, lay_out(**kind)) < TOLERANCE


def evaluate_within_step(training: Training, way: LayOut) -> bool:
    """True if a pass between backward and the step leaves old weights for the next pass."""
    trained = LaidOutTraining(training, way, this_world())
    layout, inputs = trained.layout, data()[0]
    layout.begin()
    layout.backward(layout.module(inputs).square().mean(), 1.0)
    with torch.no_grad():
        before = layout.module(inputs)
    trained.binding.optimizer.step()
    layout.stepped()
    with torch.no_grad():
        return torch.equal(layout.module(inputs), before)


@KINDS
def test_weights_gathered_to_evaluate_are_not_used_after_the_step(kind: Any) -> None:
    found = run_in_memory(evaluate_within_step, 2, training_of(deep, sgd), lay_out(**kind))
    assert found == [False, False]


def forgotten_gradient(training: Training, way: LayOut) -> tuple[bool, bool]:
    trained = LaidOutTraining(training, way, this_world())
    layout = trained.layout
    assert isinstance(layout, ShardedLayout)
    without = layout.synchronised()
    trained.step(0)
    layout.fsdp_parameters[0]._unsharded_param.grad = torch.ones(7, 5)
    return without, layout.synchronised()


def test_a_gradient_that_was_not_reduced_is_noticed() -> None:
    found = run_in_memory(forgotten_gradient, 2, training_of(deep), lay_out(**ZERO2))
    assert found == [(False, False)] * 2
