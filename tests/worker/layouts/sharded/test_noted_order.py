"""Records of the layers that ranks gather on a device: a message before each gathering would delay
its stream. Ranks that compute with different layers find out at the step's end; if they wait for
each other before it, they compare records."""

from functools import partial
from typing import Any

import pytest
import torch
from support.collectives.late_groups import late_groups
from support.collectives.strategy_runs import Run, entered, take_step
from support.models.different_layers import Twins
from support.models.left_out_layers import Chain, loader, refused_after_a_step
from torch import nn
from torch.distributed import get_rank
from torch.nn.functional import cross_entropy

import shoal
from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.layer_exchanges import ExchangeRecord, difference
from shoal.strategies.layout.sharded import ShardedStrategy

MADE = {
    "zero2": partial(shoal.Zero2, min_group_bytes=0, copies=0),
    "fsdp": partial(shoal.FSDP, min_group_bytes=0, copies=0),
    "hsdp": partial(shoal.HSDP, shard=2, min_group_bytes=0, copies=0),
}


def in_another_order(made: Any, at: str) -> str:
    def change(module: Any) -> None:
        module.differs = "order" if get_rank() == 1 else ""

    return refused_after_a_step(Twins(), made(), change, at)


@pytest.mark.parametrize("at", ["a step", "an evaluation"])
@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_layers_of_one_size_in_another_order_are_refused_on_all(strategy: str, at: str) -> None:
    """Messages of both layers have the same size, so no transport notices."""
    with late_groups():
        refusals = run_in_memory(in_another_order, 2, MADE[strategy], at)
    for refusal in refusals:
        assert "computed with different layers at the same time" in refusal
        assert "at the weights of the layer of twins.0.0.weight" in refusal
        assert "at the weights of the layer of twins.1.0.weight" in refusal


def noted_where_one_is_left_out(made: Any) -> ExchangeRecord | None:
    """Return the record of a rank that waits, in vain, for the others."""
    model = Chain()
    run = Run(
        build=lambda _: (model, torch.optim.SGD(model.parameters(), lr=0.05)),
        loader=loader,
        loss=cross_entropy,
    )
    strategy = made()
    assert isinstance(strategy, ShardedStrategy)
    share = entered(run, strategy)
    module: Any = strategy.module
    module.left_out = "drop" if get_rank() == 1 else ""
    try:
        take_step(strategy, loader().synchronous(0, *share), cross_entropy)
    except RuntimeError:
        # The in-memory backend refuses different operations; NCCL would wait.
        return strategy.position.exchanges.record()
    raise AssertionError("messages of different sizes were added")


def test_the_records_of_ranks_show_which_layer_one_has_left_out() -> None:
    with late_groups():
        noted = run_in_memory(noted_where_one_is_left_out, 2, MADE["fsdp"])
    found = difference({f"m{rank}": each for rank, each in enumerate(noted) if each is not None})
    assert found == {
        "m0": "at the weights of the layer of drop.weight",
        "m1": "at the weights of the layer of last.weight",
    }


def taken(made: Any, model: nn.Module) -> int:
    run = Run(
        build=lambda _: (model, torch.optim.SGD(model.parameters(), lr=0.05)),
        loader=loader,
        loss=cross_entropy,
    )
    strategy = made()
    share = entered(run, strategy)
    for step in range(2):
        take_step(strategy, loader().synchronous(step, *share), cross_entropy)
    step_taken: int = strategy.step
    return step_taken


@pytest.mark.sampled()
@pytest.mark.parametrize(("strategy", "world_size"), [("zero2", 2), ("fsdp", 3), ("hsdp", 4)])
def test_ranks_that_compute_with_the_same_layers_are_not_refused(
    strategy: str, world_size: int
) -> None:
    with late_groups():
        found = run_in_memory(lambda: taken(MADE[strategy], Twins()), world_size)
    assert found == [2] * world_size
