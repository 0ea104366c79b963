"""Batches cut into parts train every strategy to the weights of one process that does not cut them.

Shares differ in size, and some are smaller than the number of parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import (
    StepOptions,
    by_a_rank,
    by_one_process,
    difference,
    entered,
    take_step,
)
from support.models.seeding import draw_parameters
from support.training import equality
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.backends.in_memory.run import run_in_memory
from shoal.backends.process_group.collectives import Count, counts, reset_counts
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import UnequalPasses

TOLERANCE = 1e-5
CUT = (3, 3, 1, 4, 4)
"""Parts of each step, repeated. This includes 7 samples on 3 members, in 4 parts."""
WORLDS = [
    *(("ddp", 2), ("ddp", 3), ("zero1", 3), ("zero2", 3), ("fsdp", 2), ("fsdp", 3)),
    *(("tensor", 2), ("fsdp-tensor", 4), ("pipeline", 2), ("hybrid", 4)),
]


@pytest.mark.sampled()
@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_parts_add_up_to_the_gradient_of_the_batch(strategy: str, world_size: int) -> None:
    """Clipping needs the norm of all parts together."""
    clipped = StepOptions(max_norm=0.1)
    expected = by_one_process(equality.run_of("sgd", step_options=clipped, num_steps=15))
    cut = StepOptions(max_norm=0.1, parts_of_session=CUT)
    run = equality.run_of("sgd", step_options=cut, num_steps=15)
    for ours in run_in_memory(by_a_rank, world_size, run, equality.made(strategy, world_size)):
        assert difference(ours, expected) < TOLERANCE


class Recomputed(nn.Module):
    """A model whose blocks are recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(7, 5)
        self.keeps = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            again = not self.keeps
            hidden = checkpoint(block, hidden, use_reentrant=False) if again else block(hidden)
        outputs: Tensor = self.last(hidden)
        return outputs


def recomputed(seed: int, *, keeps: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Recomputed()
    model.keeps = keeps
    draw_parameters(model, seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.sampled()
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_activation_checkpointing_changes_nothing(strategy: str) -> None:
    """Holds for batches in parts, too."""
    plain = equality.run_of("sgd", num_steps=8)
    expected = by_one_process(replace(plain, build=partial(recomputed, keeps=True)))
    run = replace(plain, build=recomputed, step_options=StepOptions(parts_of_session=(3, 1)))
    for ours in run_in_memory(by_a_rank, 3, run, equality.made(strategy, 3)):
        assert difference(ours, expected) < TOLERANCE


def _bytes_reduced(strategy_of: Callable[[], Strategy], num_parts: Sequence[int]) -> list[int]:
    """Return the bytes reduced in each step."""
    strategy = strategy_of()
    assert isinstance(strategy, SynchronousStrategy)
    run = equality.run_of("sgd")
    share_of_rank, loader = entered(run, strategy), run.loader()
    found = []
    for step, parts in enumerate(num_parts):
        reset_counts()
        batch = loader.synchronous(step, *share_of_rank)
        take_step(strategy, batch, run.loss, StepOptions(parts_of_session=[parts] * (step + 1)))
        reduced = [counts().get(name, Count(0, 0)) for name in ("all_reduce", "reduce_scatter")]
        found.append(sum(count.bytes for count in reduced))
    strategy.close()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_gradients_are_reduced_once_a_step(strategy: str) -> None:
    """The first part is reduced separately only in the first step that is cut. The other messages
    of members have 32 bytes each."""
    messages = 4 * 32 * 2
    for found in run_in_memory(_bytes_reduced, 2, equality.made(strategy, 2), [1, 3, 3, 4, 4, 1]):
        once, twice, *others, last = found
        assert 2 * once - messages <= twice <= 2 * once + messages
        assert all(once - messages <= each <= once + messages for each in (*others, last))
        assert once > messages


def _refused(strategy_of: Callable[[], Strategy], ways: Sequence[Sequence[int]]) -> tuple[str, int]:
    """Return the refusal of a rank that cuts steps as its `ways` say, and the steps that it has
    committed by then."""
    strategy = strategy_of()
    assert isinstance(strategy, SynchronousStrategy)
    run, own = equality.run_of("sgd"), ways[dist.get_rank()]
    share_of_rank, loader = entered(run, strategy), run.loader()
    try:
        for step in range(len(own)):
            batch = loader.synchronous(step, *share_of_rank)
            take_step(strategy, batch, run.loss, StepOptions(parts_of_session=own))
    except UnequalPasses as error:
        dist.barrier()
        return str(error), strategy.step
    finally:
        strategy.close()
    raise AssertionError("all steps were taken")


WAYS = [
    (([1, 1], [1, 3]), "saw 1 by"),
    (([3, 1], [3, 3]), "1 or more by"),
    (([3, 3], [3, 4]), "3 (batch.parts) by"),
    (([2], [4]), "2 (batch.parts) by"),
]


@pytest.mark.parametrize(
    ("strategy", "ways", "words"),
    [
        *((strategy, *way) for strategy in ("ddp", "zero1", "fsdp") for way in WAYS),
        # Values sent between layers have the shape of a part.
        *(("tensor", ways, text.replace("saw 1 by", "saw 1 or more by")) for ways, text in WAYS),
        *(("pipeline", ways, text.replace("saw 1 by", "saw 1 or more by")) for ways, text in WAYS),
    ],
)
def test_members_that_cut_a_step_differently_are_refused(
    strategy: str, ways: Sequence[Sequence[int]], words: str
) -> None:
    """Members all get the error before any commits the step, whether or not the step before was
    cut."""
    errors = run_in_memory(_refused, 2, equality.made(strategy, 2), ways)
    assert len(set(errors)) == 1
    text, num_committed = errors[0]
    assert words in text
    assert num_committed == len(ways[0]) - 1
