"""The state that a rank holds, collected again and again: the present state, whatever a script or
its optimizer has changed since it was collected last."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.processes.worlds import LaidOutTraining, Training, this_world
from torch import Tensor, nn

from shoal.backends.in_memory.run import run_in_memory
from shoal.layouts.optimizer_binding import OptimizerBinding
from shoal.layouts.sharded.layout import ShardedLayout, ShardedOptions
from shoal.layouts.zero1 import Zero1Layout
from shoal.model.local_parts import local_part
from shoal.state.shards import StateShard
from shoal_proto.errors import UnsupportedOptimizer

LAYOUTS = pytest.mark.parametrize("kind", ["rows", "whole"])
Change = Callable[[OptimizerBinding], object]


class Counts(torch.optim.SGD):
    """An optimizer with a number in its state, a new object in each step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["kept"] = state.get("kept", 0) + 1


class Lists(torch.optim.SGD):
    """An optimizer with a list in its state: the same object after a step, with other contents."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("kept", []).append(1.0)


def trained(kind: str, optimizer: Callable[..., torch.optim.Optimizer]) -> OptimizerBinding:
    """Return the binding of this rank, after one step."""
    training = Training(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        optimizer=optimizer,
        data=lambda: (torch.ones(12, 4), torch.zeros(12, 4)),
        loss=nn.functional.mse_loss,
    )
    options = ShardedOptions(min_group_bytes=1)
    lay_out = Zero1Layout if kind == "whole" else lambda m, w: ShardedLayout(m, w, options)
    laid_out = LaidOutTraining(training, lay_out, this_world())
    laid_out.step(0)
    return laid_out.binding


def first_of(binding: OptimizerBinding) -> tuple[str, nn.Parameter, dict[str, Any]]:
    """Return the name, the parameter and the state of a weight that this rank steps."""
    name, parameter = next((n, p) for n, p in binding.layout.parameters.items() if p.ndim == 2)
    return name, parameter, binding.optimizer.state[parameter]


def present(binding: OptimizerBinding) -> dict[str, Tensor]:
    """Return copies of all tensors that this rank holds, read one by one."""
    tensors = {f"model.{name}": tensor for name, tensor in binding.held.items()}
    for name, parameter in binding.layout.parameters.items():
        for key, value in binding.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optim.{name}/{key}"] = value
    parts = {path: local_part(tensor).clone() for path, tensor in tensors.items()}
    return {path: part for path, part in parts.items() if part.numel()}


def collected_after(kind: str, change: Change) -> list[str]:
    """Return, for each of two ranks, how the collected state differs from the present state after
    `change`; empty if it does not."""

    def body() -> str:
        binding = trained(kind, partial(torch.optim.AdamW, lr=0.1))
        binding.collect(1)
        with torch.no_grad():
            change(binding)
        found = binding.collect(2).shards
        expected = present(binding)
        if found.keys() != expected.keys():
            return f"names differ: {found.keys() ^ expected.keys()}"
        return " ".join(n for n, each in found.items() if not each.tensor.equal(expected[n]))

    return run_in_memory(body, 2)


def write_in_place(binding: OptimizerBinding) -> None:
    _, parameter, state = first_of(binding)
    local_part(parameter).add_(1.0)
    local_part(state["exp_avg"]).add_(1.0)


def gain(binding: OptimizerBinding) -> None:
    _, parameter, state = first_of(binding)
    state["extra"] = torch.ones_like(parameter)


def lose(binding: OptimizerBinding) -> None:
    del first_of(binding)[2]["exp_avg"]


def lose_all_of_a_parameter(binding: OptimizerBinding) -> None:
    del binding.optimizer.state[first_of(binding)[1]]


def replace_state(binding: OptimizerBinding) -> None:
    _, _, state = first_of(binding)
    state["exp_avg"] = state["exp_avg"] + 1.0


def rename(binding: OptimizerBinding) -> None:
    _, _, state = first_of(binding)
    state["renamed"] = state.pop("exp_avg")


@LAYOUTS
@pytest.mark.parametrize(
    "change", [write_in_place, gain, lose, lose_all_of_a_parameter, replace_state, rename]
)
def test_a_state_is_collected_as_it_is_now(kind: str, change: Change) -> None:
    assert collected_after(kind, change) == ["", ""]


def assign(binding: OptimizerBinding) -> None:
    """Give a parameter new memory, as `parameter.data = ...` of a script does."""
    parameter = first_of(binding)[1]
    parameter.data = parameter + 1.0


def transpose(binding: OptimizerBinding) -> None:
    """Give a parameter the same memory in another order."""
    parameter = first_of(binding)[1]
    parameter.data = parameter.data.t()


@pytest.mark.parametrize("change", [assign, transpose])
def test_a_parameter_with_other_memory_is_collected_from_there(change: Change) -> None:
    assert collected_after("whole", change) == ["", ""]


@LAYOUTS
def test_shards_are_made_once_for_the_same_tensors(kind: str) -> None:
    """Making them takes most of the time of a copy."""

    def body() -> bool:
        binding = trained(kind, partial(torch.optim.AdamW, lr=0.1))
        return binding.collect(1).shards is binding.collect(2).shards

    assert run_in_memory(body, 2) == [True, True]


@pytest.mark.parametrize(("optimizer", "kept"), [(Counts, [1, 2]), (Lists, [[1.0], [1.0, 1.0]])])
def test_plain_values_are_collected_as_they_are_now(
    optimizer: Callable[..., torch.optim.Optimizer], kept: list[Any]
) -> None:
    def body() -> list[Any]:
        binding = trained("rows", partial(optimizer, lr=0.1))
        seen = []
        for step in (1, 2):
            slots: Any = binding.collect(step).values["slots"]
            seen.append(copy.deepcopy(slots["0.weight"]["kept"]))
            binding.optimizer.step()
        return seen

    assert run_in_memory(body, 2) == [kept, kept]


def test_a_setting_of_a_group_is_collected_as_it_is_now() -> None:
    def body() -> list[Any]:
        binding = trained("rows", partial(torch.optim.AdamW, lr=0.1))
        found: list[StateShard] = [binding.collect(1)]
        binding.optimizer.param_groups[0]["lr"] = 0.2
        found.append(binding.collect(2))
        groups: list[Any] = [each.values["groups"] for each in found]
        return [each[0]["lr"] for each in groups]

    assert run_in_memory(body, 2) == [[0.1, 0.2]] * 2


def resize(state: dict[str, Any]) -> None:
    state["exp_avg"].resize_(2, 2)


def reinterpret(state: dict[str, Any]) -> None:
    """Give a tensor the same memory with another dtype."""
    state["exp_avg"].data = state["exp_avg"].data.view(torch.int32)


@pytest.mark.parametrize(
    ("change", "seen"),
    [(resize, "(2, 2) of torch.float32"), (reinterpret, "(4, 4) of torch.int32")],
)
def test_a_tensor_that_is_no_longer_as_it_was_is_refused(
    change: Callable[[dict[str, Any]], None], seen: str
) -> None:
    def body() -> str:
        binding = trained("whole", partial(torch.optim.AdamW, lr=0.1))
        binding.collect(1)
        change(first_of(binding)[2])
        try:
            binding.collect(2)
        except UnsupportedOptimizer as refusal:
            return str(refusal)
        return "nothing"

    assert all(seen in each for each in run_in_memory(body, 2))
