"""Synchronous strategies train to the weights that one process trains to, in 50 steps.

The members' shares of a batch differ in size, as do their parts of each parameter, and one
parameter gets no gradient. Local SGD is compared with replicas in `local_sgd/test_strategy`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.collectives.strategy_runs import (
    Run,
    StepOptions,
    by_a_rank,
    by_one_process,
    difference,
)
from torch import Tensor, nn

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.strategies.base import Strategy

TOLERANCE = 1e-5
"""Limit for fp32; only the order of additions differs."""
NUM_SAMPLES = 47


class Net(nn.Module):
    """A model of indivisible widths, one of them below the number of ranks, and with an unused
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh()),
            *(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5)),
        )
        self.idle = nn.Parameter(torch.ones(5))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class InHalf(nn.Module):
    """Wrapper that computes in bf16 while the trained weights stay in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        halves = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        outputs: Tensor = torch.func.functional_call(self.model, halves, (inputs.bfloat16(),))
        return outputs.float()


def build(optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, generator = Net(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    if optimizer == "adamw":
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loader() -> Loader:
    """Return batches of 10 and, at the end of an epoch, of 7."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    order = Order(num_samples=NUM_SAMPLES, global_batch_size=10, num_epochs=20)
    return Loader((inputs, (inputs.sum(1) > 0).long()), order)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets)


def run_of(optimizer: str, **options: object) -> Run:
    return Run(build=partial(build, optimizer), loader=loader, loss=loss, **options)  # type: ignore[arg-type]


# torch's DDP needs an option for parameters that may get no gradient.
STRATEGIES: Mapping[str, Callable[..., Strategy]] = {
    "ddp": partial(shoal.DDP, find_unused_parameters=True),
    "zero1": partial(shoal.Zero1, find_unused_parameters=True, copies=0),
    "zero2": partial(shoal.Zero2, copies=0),
    "fsdp": partial(shoal.FSDP, min_group_bytes=200, copies=0),
    "hsdp": partial(shoal.HSDP, shard=2, min_group_bytes=200, copies=0),
    "tensor": partial(shoal.TensorParallel, min_split_bytes=0, copies=0),
    "fsdp-tensor": partial(
        shoal.FSDPTensor, tensor=2, min_split_bytes=0, min_group_bytes=200, copies=0
    ),
    "pipeline": partial(shoal.Pipeline, copies=0),
    "hybrid": partial(shoal.Hybrid, min_split_bytes=0, copies=0),
}
TWO_DIMENSIONS = ("hsdp", "fsdp-tensor")
WORLDS = [
    # Two by two come first: with other small world sizes these are like "fsdp".
    ("hsdp", 4),
    ("fsdp-tensor", 4),
    *((n, size) for n in STRATEGIES if n not in TWO_DIMENSIONS for size in (2, 3, 4)),
    *(("fsdp-tensor", 2), ("hsdp", 6), ("fsdp-tensor", 6), ("hybrid", 8)),
]
MESHES = {2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}
"""Stages, copies and splits of "hybrid", by world size."""


def made(strategy: str, world_size: int, **options: str) -> Callable[[], Strategy]:
    sizes: dict[str, int] = {}
    if strategy == "hybrid":
        sizes = dict(zip(("pipeline", "data", "tensor"), MESHES[world_size], strict=True))
    return partial(STRATEGIES[strategy], **sizes, **options)


@pytest.mark.sampled()
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_equal_with_clipping_and_accumulation(
    strategy: str, world_size: int, optimizer: str
) -> None:
    """A fifth of the steps accumulate over two passes; most norms are clipped."""
    clipped = StepOptions(max_norm=0.1)
    expected = by_one_process(run_of(optimizer, step_options=clipped))
    assert difference(expected, by_one_process(run_of(optimizer))) > 1e-2, "clipping does nothing"
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
