"""Passes of many kinds under ddp and zero1 train to the weights of one process.

A loss may need several forward passes, parts of the model in turn, or blocks that are recomputed in
the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.collectives.strategy_runs import Rank, Run, by_a_rank, by_one_process, difference
from support.models.seeding import draw_parameters
from support.training import equality
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch, Loader
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import InvalidSpec

TOLERANCE = 1e-10
NUM_STEPS, WORLD_SIZE = 12, 3


@dataclass
class Outputs:
    """An object in which torch's search for outputs finds no tensor, because no field is one."""

    found: Callable[[], Tensor]


class Net(nn.Module):
    """A model with a layer whose buffers change in each forward pass, and are needed in
    backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.1).eval()
        self.trunk = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

    def forward(self, inputs: Tensor, way: str) -> Any:
        x = self.trunk(self.norm(inputs)).tanh()
        if way.startswith("head"):
            return self.heads[int(way.removeprefix("head "))](x)
        if way == "slope":
            total = self.heads[0](self.block(x)).sum()
            return torch.autograd.grad(total, x, create_graph=True)[0].sum(1, keepdim=True)
        if way == "unseen":
            outputs = self.heads[1](self.block(x))
            return Outputs(lambda: outputs)
        for _ in range(2):
            if way in ("reentrant", "again"):
                x = checkpoint(self.block, x, use_reentrant=way == "reentrant")
            else:
                x = self.block(x)
        return torch.cat([head(x) for head in self.heads], 1)


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def two_heads(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Two losses, each with a forward and a backward pass of its own."""
    yield square(model(inputs, "head 0"), targets)
    yield square(model(inputs, "head 2"), -targets)


def two_losses(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Two forward passes before two backward passes."""
    one, other = (model(inputs + shift, "all") for shift in (0, 1))
    yield square(one, targets)
    yield other.square().mean()


def one_loss(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """A loss of two forward passes, each of another part of the model."""
    yield square(model(inputs, "head 0") * model(inputs, "head 1"), targets)


def unseen(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """A loss of outputs that are in an object of the script's own."""
    yield square(model(inputs, "unseen").found(), targets)


def reentrant(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """A loss of a block that is used twice, and recomputed in the backward pass."""
    yield square(model(inputs, "reentrant"), targets)


def again(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    yield square(model(inputs, "again"), targets)


def in_part(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """Two passes, the second of which leaves out parameters of the first."""
    yield from reentrant(model, inputs, targets)
    yield square(model(inputs, "head 1"), targets)


def penalised(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """A loss that includes the gradient of the outputs."""
    inputs = inputs.clone().requires_grad_()
    outputs = model(inputs, "all")
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    yield square(outputs, targets) + slope.square().sum(1).mean()


Passes = Callable[[Any, Tensor, Tensor], Iterator[Tensor]]
SOME: tuple[Passes, ...] = (two_heads, one_loss, unseen)
"""Passes that leave parameters without a gradient."""
ALL: tuple[Passes, ...] = (two_losses, reentrant, again, penalised)


def build(_: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net().double()
    draw_parameters(model, 0)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def loader() -> Loader:
    inputs = equality.samples()[0].double()
    return Loader((inputs, inputs.sum(1, keepdim=True)), equality.loader().order)


RUN = Run(build=build, loader=loader, loss=square, num_steps=NUM_STEPS)


def alone(passes: Passes, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    for loss in passes(model, batch.inputs, batch.targets):
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def take(passes: Passes, rank: Rank, batch: Batch) -> None:
    rank.strategy.begin_step()
    for loss in passes(rank.model, batch.inputs, batch.targets):
        rank.strategy.backward(loss, batch.weight)
    rank.strategy.end_step(lambda: None)


STRATEGIES = {"ddp": shoal.DDP, "zero1": shoal.Zero1}


@pytest.mark.sampled()
@pytest.mark.parametrize("passes", [*SOME, in_part, *ALL])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_are_as_in_one_process(strategy: str, passes: Passes) -> None:
    """Runs with the option for parameters without a gradient, and also without it if there are
    none."""
    expected = by_one_process(RUN, partial(alone, passes))
    for unused in (True, False) if passes in ALL else (True,):
        made_of = partial(STRATEGIES[strategy], find_unused_parameters=unused)
        for ours in run_in_memory(by_a_rank, WORLD_SIZE, RUN, made_of, partial(take, passes)):
            assert difference(ours, expected) < TOLERANCE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_later_pass_that_leaves_parameters_out_is_refused(strategy: str) -> None:
    """The parameters have gradients, from the first pass."""
    kind = STRATEGIES[strategy]
    text = rf"earlier pass.*shoal\.{kind.__name__}\(find_unused_parameters=True\)"
    with pytest.raises(InvalidSpec, match=text):
        run_in_memory(by_a_rank, 1, RUN, kind, partial(take, in_part))


@pytest.mark.parametrize("passes", SOME)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_without_a_gradient_are_named(strategy: str, passes: Passes) -> None:
    """The error names the strategy's option that allows them, in the first pass that leaves them
    out."""
    kind = STRATEGIES[strategy]
    text = rf"saw .*heads\.\d\.weight.*shoal\.{kind.__name__}\(find_unused_parameters=True\)"
    with pytest.raises(InvalidSpec, match=text):
        run_in_memory(by_a_rank, 1, RUN, kind, partial(take, passes))


def in_forward(model: Any, inputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
    """A loss of a gradient that the model computes itself."""
    yield square(model(inputs, "slope"), targets)


@pytest.mark.parametrize("passes", [penalised, in_forward])
@pytest.mark.parametrize(
    "made",
    [
        shoal.TensorParallel,
        partial(shoal.FSDPTensor, tensor=2),
        partial(shoal.Hybrid, pipeline=1, data=1, tensor=2),
    ],
    ids=["tensor", "fsdp-tensor", "hybrid"],
)
def test_gradients_of_gradients_of_split_layers_are_refused(
    made: Callable[..., SynchronousStrategy], passes: Passes
) -> None:
    """Regression: each rank added its own part of the second derivative, without the others'."""
    with pytest.raises(InvalidSpec, match=r"differentiated again.*ddp and zero1"):
        run_in_memory(by_a_rank, 2, RUN, partial(made, min_split_bytes=0), partial(take, passes))
