"""A step begins without gradients, with any optimizer."""

from typing import Any

import torch
from torch import nn

from shoal.model.gradients import StepGradients


class Counting(torch.optim.SGD):
    """An optimizer with a `zero_grad` of its own."""

    num_calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_calls += 1
        super().zero_grad(set_to_none)


def with_gradients() -> nn.Linear:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())
    return model


def test_no_parameter_has_a_gradient_also_if_the_optimizer_does_not_hold_it() -> None:
    model = with_gradients()
    StepGradients(model.parameters(), torch.optim.SGD([model.weight], lr=0.1)).forget()
    assert all(each.grad is None for each in model.parameters())


def test_the_zero_grad_of_an_optimizers_class_is_called() -> None:
    model = with_gradients()
    optimizer = Counting(model.parameters(), lr=0.1)
    StepGradients(model.parameters(), optimizer).forget()
    assert optimizer.num_calls == 1
    assert all(each.grad is None for each in model.parameters())


def test_a_zero_grad_that_the_script_has_assigned_is_called() -> None:
    model = with_gradients()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[bool] = []

    def zero_grad(set_to_none: bool) -> None:
        calls.append(set_to_none)

    optimizer.zero_grad = zero_grad
    StepGradients(model.parameters(), optimizer).forget()
    assert calls == [True]


def test_dropping_gradients_makes_no_record_in_a_profiler() -> None:
    """A profiler's record takes several times as long, in each step."""
    model = with_gradients()
    gradients = StepGradients(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.profiler.profile() as profile:
        gradients.forget()
    assert not [each for each in profile.events() or () if "zero_grad" in each.name]
