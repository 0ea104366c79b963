"""Losses over the rows of all members, with unequal shares: weights are those of one process."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from support.collectives.strategy_runs import (
    Rank,
    Run,
    by_a_rank,
    by_one_process,
    difference,
    take_step,
)
from support.members import contrastive_members
from support.members.contrastive_members import of_all, of_own
from support.training import equality
from torch import Tensor

from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Batch, Loader
from shoal.data.order import Order
from shoal.layouts.gathered_rows import RowGathers, Share

TOLERANCE = 1e-12
"""Limit for float64."""
NUM_STEPS = 8
"""Steps of two epochs. The last batch of each has two samples, so one of three members has none."""
WORLDS = [
    *((name, size) for name in ("ddp", "zero1", "zero2", "fsdp") for size in (2, 3)),
    *(("hsdp", 4), ("tensor", 2), ("fsdp-tensor", 4), ("hybrid", 4)),
]


def loader() -> Loader:
    order = Order(num_samples=23, global_batch_size=7, num_epochs=4)
    return Loader(contrastive_members.samples(23), order)


RUN = Run(
    build=contrastive_members.build,
    loader=loader,
    loss=lambda outputs, _: of_all(outputs),
    num_steps=NUM_STEPS,
)


def take(whole: bool, rank: Rank, batch: Batch) -> None:
    strategy, (index, _) = rank.strategy, rank.share
    names = [f"m{each}" for each in range(dist.get_world_size())]
    share = Share(index=index, num_samples=len(batch.indices))
    gathers = RowGathers(strategy.group, names, share, batch.step, strategy.position.waits)

    def loss(outputs: Tensor, targets: Any) -> Tensor:
        every = gathers.gather(outputs)
        return of_all(every) if whole else of_own(outputs, every, batch.first)

    take_step(strategy, batch, loss)
    gathers.close()


@pytest.mark.sampled()
@pytest.mark.parametrize("whole", [True, False], ids=["all rows", "own rows"])
@pytest.mark.parametrize(("name", "world_size"), WORLDS)
def test_weights_are_those_of_one_process(name: str, world_size: int, whole: bool) -> None:
    expected = by_one_process(RUN)
    mesh = {"pipeline": 1, "data": 2, "tensor": 2} if name == "hybrid" else {}
    made = partial(equality.STRATEGIES[name], **mesh)
    for ours in run_in_memory(by_a_rank, world_size, RUN, made, partial(take, whole)):
        assert difference(ours, expected) < TOLERANCE


def test_without_gathering_weights_differ_from_those_of_one_process() -> None:
    model, optimizer = RUN.build(0)
    for step in range(NUM_STEPS):
        shares = [loader().synchronous(step, index, 3) for index in range(3)]
        optimizer.zero_grad()
        for each in shares:
            (of_all(model(each.inputs)) * each.weight / 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert difference(dict(model.state_dict()), by_one_process(RUN)) > 1e-3
