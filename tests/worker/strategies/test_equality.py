"""Synchronous strategies train to the weights that one process trains to, in 50 steps.

The members' shares of a batch differ in size, as do their parts of each parameter, and one
parameter gets no gradient. Local SGD is compared with replicas in `local_sgd/test_strategy`.
"""

from dataclasses import replace

import pytest
import torch
from support.collectives.strategy_runs import (
    StepOptions,
    by_a_rank,
    by_one_process,
    difference,
)
from support.training.equality import TOLERANCE, WORLDS, build, made, run_of
from torch import Tensor, nn

from shoal.backends.in_memory.run import run_in_memory


class InHalf(nn.Module):
    """Wrapper that computes in bf16 while the trained weights stay in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        halves = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        outputs: Tensor = torch.func.functional_call(self.model, halves, (inputs.bfloat16(),))
        return outputs.float()


@pytest.mark.sampled()
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_equal_with_clipping_and_accumulation(
    strategy: str, world_size: int, optimizer: str
) -> None:
    """A fifth of the steps accumulate over two passes; most norms are clipped."""
    clipped = StepOptions(max_norm=0.1)
    expected = by_one_process(run_of(optimizer, step_options=clipped))
    assert difference(expected, by_one_process(run_of(optimizer))) > 5e-3, "clipping does nothing"
    run = run_of(optimizer, step_options=replace(clipped, passes=(1, 1, 1, 1, 2)))
    for ours in run_in_memory(by_a_rank, world_size, run, made(strategy, world_size)):
        assert difference(ours, expected) < TOLERANCE


PARTS_OF_STAGES = (2, 2, 2, 2, 1)
"""Micro-batches of a pipeline: 4 divides neither 10 nor 7."""


@pytest.mark.sampled()
@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_equal_in_mixed_precision(strategy: str, world_size: int) -> None:
    """Layers compute in bf16, by the strategy's own means if it has some, otherwise by autocast.

    A gradient is rounded to 8 bits in each part of the batch that is computed separately. One
    process that computes the same parts rounds the same, so fp32's tolerance holds. If layers are
    split, their summands are rounded before the sum, and a mesh has parts of many sizes: the
    tolerance is then one of these roundings, 2^-7, of the distance that the weights have moved.
    """
    optimizer = "adamw" if world_size == 3 else "sgd"
    single = by_one_process(run_of(optimizer))
    parts = PARTS_OF_STAGES if strategy == "pipeline" else (world_size,)
    tolerance = TOLERANCE
    if strategy in ("tensor", "hybrid", "fsdp-tensor"):
        start, _ = build(optimizer, 0)
        parts, tolerance = (1,), 2**-7 * difference(single, start.state_dict())
    if strategy in ("zero2", "fsdp", "hsdp"):
        run, whole = run_of(optimizer), run_of(optimizer, computing=InHalf)
        way = made(strategy, world_size, param_dtype="bf16", reduce_dtype="fp32")
    else:
        run = whole = run_of(optimizer, step_options=StepOptions(autocast=torch.bfloat16))
        way = made(strategy, world_size)
    expected = by_one_process(
        replace(whole, step_options=replace(whole.step_options, passes=parts))
    )
    for ours in run_in_memory(by_a_rank, world_size, run, way):
        assert difference(ours, expected) < tolerance
        assert difference(ours, single) > 10 * TOLERANCE, "nothing was computed in bf16"
