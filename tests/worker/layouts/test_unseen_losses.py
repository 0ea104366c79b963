"""A loss on a GPU is checked with the step's gradients, and stops all ranks in the same step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.models import tensor_models as models
from support.processes.worlds import LaidOutTraining, Training, this_world
from torch import Tensor

from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.base import Layout
from shoal.strategies.layout.ddp import DDP
from shoal.strategies.layout.fsdp import FSDP, HSDP, Zero2
from shoal.strategies.layout.fsdp_tensor import FSDPTensor
from shoal.strategies.layout.hybrid import Hybrid
from shoal.strategies.layout.strategy import LayoutStrategy
from shoal.strategies.layout.tensor import TensorParallel
from shoal.strategies.layout.zero1 import Zero1
from shoal_proto.errors import GenerationBroken, NonFiniteGradient

STEP = 4
ARRANGEMENTS: dict[str, tuple[int, LayoutStrategy]] = {
    "ddp": (2, DDP()),
    "zero1": (2, Zero1()),
    "zero1 alone": (1, Zero1()),
    "zero2": (3, Zero2()),
    "fsdp": (3, FSDP()),
    "fsdp alone": (1, FSDP()),
    "hsdp": (4, HSDP(shard=2)),
    "tensor": (2, TensorParallel(min_split_bytes=0)),
    "fsdp-tensor": (4, FSDPTensor(tensor=2, min_split_bytes=0)),
    "copies and splits": (4, Hybrid(pipeline=1, data=2, tensor=2, min_split_bytes=0)),
}


def error_after(strategy: LayoutStrategy, value: float, faulty: frozenset[int]) -> str:
    """Return a rank's error after a pass with finite gradients and, on the faulty ranks, a loss of
    this value."""
    world = replace(this_world(), makes_passes=True)
    training = Training(
        model=models.gpt, optimizer=models.momentum, data=models.tokens, loss=models.next_token
    )
    layout = LaidOutTraining(training, strategy.lay_out, world).layout
    layout.step = STEP
    layout.begin()
    inputs, targets = training.batch(0)
    loss = training.loss(layout.module(inputs), targets)
    layout.note_loss(_seen(loss, value if dist.get_rank() in faulty else 0.0))
    layout.backward(loss, 1.0)
    return outcome(layout)


def _seen(loss: Tensor, value: float) -> Tensor:
    return loss.detach() + value


def outcome(layout: Layout) -> str:
    try:
        layout.reduce()
        layout.check()
    except (NonFiniteGradient, GenerationBroken) as error:
        assert f"at step {STEP}" in str(error)
        return "loss" if "the loss is not finite" in str(error) else type(error).__name__
    return "nothing"


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.0])
def test_all_ranks_raise_for_a_non_finite_loss_though_gradients_are_finite(
    name: str, value: float
) -> None:
    world_size, strategy = ARRANGEMENTS[name]
    # A tensor group computes one loss.
    faulty = frozenset({0, 1} if world_size > 1 and "tensor" in name else {0})
    faulty = frozenset({0, 1}) if name == "copies and splits" else faulty
    found = run_in_memory(partial(error_after, strategy, value, faulty), world_size)
    if value == 1.0:
        assert found == ["nothing"] * world_size
    else:
        assert found == [
            "loss" if rank in faulty else "GenerationBroken" for rank in range(world_size)
        ]
