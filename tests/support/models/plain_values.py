"""Optimizers whose state has more than tensors, and which check it in each step: for example in a
member that joined, or after a checkpoint."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LAST = 2
"""Number of gradients that are averaged."""


def plain_values(count: int) -> dict[str, Any]:
    """Return the values of the state after `count` steps: integers beyond a double's precision,
    extreme numbers, and texts and lists whose lengths change with each step."""
    return {
        "count": 2**70 + count,
        "seen": 2**53 + 1,
        "rate": 0.1 * (count + 1),
        "tiny": 1e-50,
        "best": 1e300,
        "bound": float("inf"),
        "phase": "warm " * (count % 3),
        "norm": None,
        "is_even": count % 2 == 0,
        "window": (count, [count / 3] * (count % 4), (None, True)),
        "table": {"left": count, 5: "five", "inner": {"empty": []}},
    }


class Keeps(Optimizer):
    """Optimizer that averages the last gradients; its state is their list, and `plain_values`."""

    elementwise = True

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.02, "window": (1, [2])})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"])

    def _step(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        count = state["table"]["left"] if state else -1
        if state:
            self.check(parameter, state, count)
        gradient = parameter.grad
        assert gradient is not None
        history = [*state.get("history", []), gradient.clone()][-LAST:]
        state.update(plain_values(count + 1))
        state["history"] = history
        state["steps"] = torch.tensor(count + 1)
        mean = sum(history[1:], history[0]) / len(history)
        parameter.add_(mean, alpha=-lr)

    def check(self, parameter: Tensor, state: dict[str, Any], count: int) -> None:
        """Raise AssertionError unless the state is exactly that of this step count."""
        for key, value in plain_values(count).items():
            assert repr(state[key]) == repr(value), (key, state[key], value)
        history = state["history"]
        assert type(history) is list
        assert len(history) == min(count + 1, LAST), (len(history), count)
        assert all(each.shape == parameter.shape for each in history)
        assert int(state["steps"]) == count


class KeepsCodes(Keeps):
    """Keeps whose state also has tensors of other shapes than the parameter: 8-bit codes, their
    scales by block, and a table that all parameters share."""

    elementwise = False
    per_parameter = True

    def _step(self, parameter: Tensor, lr: float) -> None:
        super()._step(parameter, lr)
        state = self.state[parameter]
        count = state["table"]["left"]
        state["codes"], state["scales"], state["map"] = _codes(parameter, count)
        state["packed"] = {"q": state["codes"].clone()}

    def check(self, parameter: Tensor, state: dict[str, Any], count: int) -> None:
        super().check(parameter, state, count)
        codes, scales, table = _codes(parameter, count)
        for own, expected in (
            (state["codes"], codes),
            (state["packed"]["q"], codes),
            (state["scales"], scales),
            (state["map"], table),
        ):
            assert own.dtype == expected.dtype
            assert torch.equal(own, expected)


def _codes(parameter: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    num_blocks = -(-parameter.numel() // 16)
    codes = (torch.arange(num_blocks * 16) + count).to(torch.uint8)
    scales = torch.arange(num_blocks, dtype=torch.float16) + count
    return codes, scales, torch.linspace(-1, 1, 256)


class Slips(torch.optim.SGD):
    """SGD whose state of the last parameter has, from a step on, a value that cannot be sent."""

    per_parameter = elementwise = True

    def __init__(self, parameters: Iterable[Tensor], value: object, at_step: int) -> None:
        super().__init__(parameters, lr=0.02, momentum=0.9)
        last = self.param_groups[0]["params"][-1]
        self._shape, self._value, self._at_step = last.shape, value, at_step
        self._steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if self._steps == self._at_step and parameter.shape == self._shape:
                self.state[parameter]["odd"] = self._value
        self._steps += 1
