"""Settings of an optimizer's groups are checked in each step, even if nothing seems to change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.strategies.synchronous.hyperparameters import Hyperparameters

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
