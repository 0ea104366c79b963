"""Settings of an optimizer's groups are checked in each step, even if nothing seems to change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.collectives.strategy_runs import enter
from support.training import equality
from torch import nn

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.synchronous.hyperparameters import Hyperparameters
from shoal.strategies.synchronous.strategy import SynchronousStrategy
from shoal_proto.errors import HyperparametersDiffer

CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another number": lambda group: group.update(lr=0.2),
    "an equal number, then another": lambda group: (
        group.update(lr=float("0.1")),
        group.update(lr=0.2),
    ),
    "a tensor in place": lambda group: group["weight_decay"].add_(1.0),
    "a list in place": lambda group: group["betas"].__setitem__(0, 0.5),
    "another key": lambda group: group.update(eps=group.pop("lr"), lr=group["eps"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_after_steps_without_one(change: str) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    if "tensor" in change:
        group["weight_decay"] = torch.tensor(0.5)
    if "list" in change:
        group["betas"] = [0.9, 0.99]
    hyperparameters = Hyperparameters(optimizer)
    before = hyperparameters.current_values()
    assert hyperparameters.current_values() is before
    CHANGES[change](group)
    assert hyperparameters.current_values() != before
    hyperparameters.apply(0)
    assert not hyperparameters.differences_on_retry(0)


def test_equal_settings_stay_the_same_object() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    hyperparameters = Hyperparameters(optimizer)
    before = hyperparameters.current_values()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    assert hyperparameters.current_values() is before
    optimizer.param_groups[0]["lr"].mul_(2)
    assert hyperparameters.current_values()[0]["lr"] == 0.2


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.array])
def test_a_number_of_numpys_is_the_number_that_a_newcomer_has_in_its_place(kind: Any) -> None:
    """A state is handed over with Python's own numbers."""
    given = kind(0.1)
    optimizers = [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2)]
    for optimizer, rate in zip(optimizers, (given, given.item()), strict=True):
        optimizer.param_groups[0]["lr"] = rate
    own, newcomer = map(Hyperparameters, optimizers)
    assert own.current_values() == newcomer.current_values()


def changed_after_clipping(name: str, rates: list[float], norms: list[float]) -> tuple[int, str]:
    """Clip gradients; then set this rank's rate of `rates`, and clip to its norm of `norms`. Return
    the number of committed steps, and the refusal."""
    strategy, rank = equality.made(name, 2)(), dist.get_rank()
    assert isinstance(strategy, SynchronousStrategy)
    _, _, optimizer, share = enter(equality.run_of("sgd"), strategy)
    batch, refusal = equality.loader().synchronous(0, *share), ""
    strategy.begin_step()
    loss = equality.loss(strategy.module(batch.inputs), batch.targets)
    # Under ddp, losses with weights of their own are means once all members have voted.
    strategy.backward_by_weight(loss, batch.num_samples)
    try:
        for norm in (1.0, *norms[rank : rank + 1]):
            strategy.position.norms.append(norm)
            strategy.clip_grad_norm(norm)
        optimizer.param_groups[0]["lr"] = rates[rank]
        strategy.end_step(lambda: None)
    except HyperparametersDiffer as error:
        dist.barrier()
        refusal = str(error)
    finally:
        strategy.close()
    return strategy.step, refusal


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor"])
def test_hyperparameters_that_differ_after_clipping_are_refused_on_all(strategy: str) -> None:
    """Regression: clipping settles the step's vote, so later values were applied unseen."""
    found = run_in_memory(changed_after_clipping, 2, strategy, [0.05, 0.0125], [])
    assert [step for step, _ in found] == [0, 0]
    assert found[0] == found[1]
    assert "lr of group 0: 0.05 by m0; 0.0125 by m1" in found[0][1]


def test_norms_of_a_second_clipping_that_differ_are_refused_on_all() -> None:
    found = run_in_memory(changed_after_clipping, 2, "fsdp", [0.05, 0.05], [0.5, 0.25])
    assert found[0] == found[1]
    assert "max_norm of clip_grad_norm: [1.0, 0.5] by m0; [1.0, 0.25] by m1" in found[0][1]


def test_a_rate_that_all_members_set_after_clipping_is_applied() -> None:
    assert run_in_memory(changed_after_clipping, 2, "fsdp", [0.1, 0.1], []) == [(1, "")] * 2
