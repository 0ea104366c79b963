"""Gradients that a script sees and changes after a pass are those of one process: of the whole
batch, whichever members and stages contribute to them."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from support.collectives.strategy_runs import (
    Rank,
    Run,
    by_a_rank,
    by_one_process,
    difference,
    enter,
)
from support.models.seeding import draw_parameters
from support.training import equality
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch, Loader
from shoal.session.micro_batches import MicroBatches, scaled
from shoal.step_context import StepContext, set_current
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import InvalidSpec

NUM_STEPS = 6
PASSES = {"one pass": (1,), "passes": (2,), "parts": (-3,), "parts behind a pass": (1, -3)}
"""Passes in each step, repeated; a negative number is a number of parts."""
BOUND = 0.02
"""Bound below most gradients."""


class Block(nn.Module):
    """A block around which positions can be spread."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.act = nn.Tanh()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.act(self.up(self.norm(inputs))))


class Net(nn.Module):
    """A model with a weight that two stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(2, 8), nn.Sequential(Block(), Block(), Block())
        self.last = nn.Linear(8, 5)
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, inputs: Tensor) -> Tensor:
        spread = self.first(inputs.unflatten(-1, (3, 2)))
        outputs: Tensor = self.last(self.blocks(spread)).mean(1)
        return outputs


def build(seed: int) -> tuple[nn.Module, Optimizer]:
    model = Net().double()
    draw_parameters(model, seed)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def loader() -> Loader:
    inputs, targets = equality.samples()
    return Loader((inputs.double(), targets), equality.loader().order)


RUN = Run(build=build, loader=loader, loss=cross_entropy, num_steps=NUM_STEPS)


@torch.no_grad()
def clamp(optimizer: Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.clamp_(-BOUND, BOUND)


def alone(passes: Sequence[int], model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    for _ in range(max(1, passes[batch.step % len(passes)])):
        cross_entropy(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        clamp(optimizer)
    optimizer.step()


def take(passes: Sequence[int], rank: Rank, batch: Batch) -> None:
    strategy, optimizer = rank.strategy, rank.optimizer
    num = passes[batch.step % len(passes)]
    strategy.begin_step()
    of_step = MicroBatches(strategy, batch, 1 << 30)
    set_current(StepContext(parts=of_step))
    for part in batch.parts(-num) if num < 0 else [batch] * num:
        fraction = of_step.begin_pass() if num < 0 else 1.0
        weighed = scaled(cross_entropy, fraction)
        strategy.forward_backward(part.inputs, part.targets, weighed, batch.weight)
        if num > 0:
            clamp(optimizer)
    if num < 0:
        clamp(optimizer)
    set_current(StepContext())
    strategy.end_step(lambda: None)


WORLDS: list[tuple[str, int, Callable[[], SynchronousStrategy]]] = [
    ("ddp", 3, shoal.DDP),
    ("zero1", 3, partial(shoal.Zero1, copies=0)),
    ("zero2", 3, partial(shoal.Zero2, copies=0)),
    ("fsdp", 3, partial(shoal.FSDP, min_group_bytes=200, copies=0)),
    ("hsdp", 4, partial(shoal.HSDP, shard=2, copies=0)),
    ("tensor", 3, partial(shoal.TensorParallel, min_split_bytes=0, copies=0)),
    ("positions", 3, partial(shoal.TensorParallel, sequence=True, min_split_bytes=0, copies=0)),
    (
        "rows of positions",
        4,
        partial(shoal.FSDPTensor, tensor=2, sequence=True, min_split_bytes=0, copies=0),
    ),
    ("pipeline", 3, partial(shoal.Pipeline, copies=0)),
    ("copies", 3, partial(shoal.Hybrid, pipeline=1, tensor=1, copies=0)),
    ("mesh", 4, partial(shoal.Hybrid, pipeline=2, data=2, tensor=1, copies=0)),
    (
        "copies of splits",
        4,
        partial(shoal.Hybrid, pipeline=1, data=2, tensor=2, min_split_bytes=0, copies=0),
    ),
]


@pytest.mark.sampled()
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize(
    ("made", "world_size"), [each[:0:-1] for each in WORLDS], ids=[each[0] for each in WORLDS]
)
def test_gradients_that_a_script_clamps_are_those_of_the_whole_batch(
    made: Callable[[], SynchronousStrategy], world_size: int, passes: Sequence[int]
) -> None:
    """Regression: between passes, and after the last one, gradients were incomplete. Under `hybrid`
    they were each copy's own, stages had their own part for a shared weight, and members that
    spread positions had summands. If clamped, or used by sharpness-aware minimisation, they trained
    something else."""
    expected = by_one_process(RUN, partial(alone, passes))
    for ours in run_in_memory(by_a_rank, world_size, RUN, made, partial(take, passes)):
        assert difference(ours, expected) < 1e-12


def test_a_layer_of_which_a_member_would_get_nothing_stays_whole() -> None:
    """Regression: 5 outputs over 4 members are 2, 2, 1 and none, and the last member ended with
    torch's RuntimeError about an empty tensor, in each generation."""
    made = partial(shoal.FSDPTensor, tensor=4, min_split_bytes=0, copies=0)
    once = PASSES["one pass"]
    expected = by_one_process(RUN, partial(alone, once))
    for ours in run_in_memory(by_a_rank, 4, RUN, made, partial(take, once)):
        assert difference(ours, expected) < 1e-12


def penalised(made: Callable[[], SynchronousStrategy]) -> str:
    """Return a rank's refusal of a penalty on weights that is a backward pass of its own."""
    strategy = made()
    rank = enter(RUN, strategy)
    batch = loader().synchronous(0, *rank.share)
    strategy.begin_step()
    strategy.forward_backward(batch.inputs, batch.targets, cross_entropy, batch.weight)
    weight = rank.optimizer.param_groups[0]["params"][0]
    with pytest.raises(InvalidSpec) as refusal:
        strategy.backward(weight.square().sum(), batch.weight)
    strategy.close()
    return str(refusal.value)


@pytest.mark.sampled()
@pytest.mark.parametrize("name", ["zero2", "fsdp", "hsdp", "rows of positions"])
def test_a_pass_through_parts_of_parameters_alone_is_refused(name: str) -> None:
    """Regression: each member weighted its own rows of the penalty by its share of the batch."""
    made, world_size = next((made, size) for each, size, made in WORLDS if each == name)
    for refusal in run_in_memory(penalised, world_size, made):
        assert "by itself, outside of a forward pass of the model" in refusal
