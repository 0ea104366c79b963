"""Losses over the rows of all members, with unequal shares: weights are those of one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from support.collectives.strategy_runs import difference, entered, take_step, take_step_alone
from support.members import contrastive_members
from support.members.contrastive_members import of_all, of_own
from torch import Tensor

from shoal.backends.in_memory.run import run_in_memory
from shoal.data.batches import Loader
from shoal.data.order import Order
from shoal.layouts.gathered_rows import RowGathers, Share
from shoal.strategies.base import Strategy
from shoal.strategies.synchronous.strategy import SynchronousStrategy

from . import test_equality as equality

TOLERANCE = 1e-12
"""Limit for float64."""
NUM_STEPS = 8
"""Steps of two epochs. The last batch of each has two samples, so one of three members has none."""
WORLDS = [
    *((name, size) for name in ("ddp", "zero1", "zero2", "fsdp") for size in (2, 3)),
    *(("hsdp", 4), ("tensor", 2), ("fsdp-tensor", 4), ("hybrid", 4)),
]


class Run:
    build = staticmethod(contrastive_members.build)


def loader() -> Loader:
    order = Order(num_samples=23, global_batch_size=7, num_epochs=4)
    return Loader(contrastive_members.samples(23), order)


def by_one_process() -> dict[str, Tensor]:
    model, optimizer = Run.build(0)
    for step in range(NUM_STEPS):
        batch = loader().synchronous(step, 0, 1)
        take_step_alone(model, optimizer, batch, lambda outputs, _: of_all(outputs))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def by_a_rank(made: Callable[[], Strategy], whole: bool) -> dict[str, Tensor]:
    strategy = made()
    assert isinstance(strategy, SynchronousStrategy)
    index, count = entered(Run(), strategy)  # type: ignore[arg-type]
    names = [f"m{rank}" for rank in range(dist.get_world_size())]
    for step in range(NUM_STEPS):
        batch = loader().synchronous(step, index, count)
        share = Share(index=index, num_samples=len(batch.indices))
        gathers = RowGathers(strategy.group, names, share, step, strategy.position.waits)

        def loss(outputs: Tensor, targets: Any) -> Tensor:
            every = gathers.gather(outputs)  # noqa: B023 - called in the step
            return of_all(every) if whole else of_own(outputs, every, batch.first)  # noqa: B023

        take_step(strategy, batch, loss)
        gathers.close()
    strategy.finish()
    weights = {name: tensor.clone() for name, tensor in strategy.state_dict().items()}
    strategy.close()
    return weights


@pytest.mark.sampled()
@pytest.mark.parametrize("whole", [True, False], ids=["all rows", "own rows"])
@pytest.mark.parametrize(("name", "world_size"), WORLDS)
def test_weights_are_those_of_one_process(name: str, world_size: int, whole: bool) -> None:
    expected = by_one_process()
    mesh = {"pipeline": 1, "data": 2, "tensor": 2} if name == "hybrid" else {}
    made = partial(equality.STRATEGIES[name], **mesh)
    for ours in run_in_memory(by_a_rank, world_size, made, whole):
        assert difference(ours, expected) < TOLERANCE


def test_without_gathering_weights_differ_from_those_of_one_process() -> None:
    model, optimizer = Run.build(0)
    for step in range(NUM_STEPS):
        shares = [loader().synchronous(step, index, 3) for index in range(3)]
        optimizer.zero_grad()
        for each in shares:
            (of_all(model(each.inputs)) * each.weight / 3).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert difference(dict(model.state_dict()), by_one_process()) > 1e-3
