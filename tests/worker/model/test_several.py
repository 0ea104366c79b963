"""Optimizers of several models, as one optimizer."""

from typing import Any

import pytest
import torch
from torch import nn

from shoal.model.several import joined
from shoal.state.optimizer_state import contents_of, refuse_other_owners
from shoal_proto.errors import UnsupportedOptimizer


def test_state_for_something_that_is_not_a_parameter_is_refused_by_name() -> None:
    models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    optimizers = {name: torch.optim.SGD(each.parameters(), 0.1) for name, each in models.items()}
    state: Any = optimizers["b"].state
    state["shared"] = {"k": 1}
    model, optimizer = joined(models, optimizers)
    assert "k" in contents_of([optimizer])
    with pytest.raises(UnsupportedOptimizer, match="'shared', which is not a parameter"):
        refuse_other_owners(optimizer, model.parameters())
