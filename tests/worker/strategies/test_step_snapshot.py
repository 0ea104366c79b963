"""Writes of a step are undone with it, from copies that are made once and reused."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.strategies.rollback import step_snapshot
from shoal.strategies.rollback.step_snapshot import StepSnapshot
from shoal_proto.errors import InvalidSpec


class Masked(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3), persistent=False)


@pytest.fixture
def on_gpus() -> Iterator[None]:
    """Make all tensors count as being on a GPU, for copies."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(step_snapshot, "is_on_host", lambda _: False)
        yield


def copies_in(snapshot: StepSnapshot, model: nn.Module) -> int:
    """Count the copies that the next step makes."""
    with pytest.MonkeyPatch.context() as patched:
        made: list[Tensor] = []
        plain = Tensor.clone

        def cloned(self: Tensor) -> Tensor:
            made.append(self)
            return plain(self)

        patched.setattr(Tensor, "clone", cloned)
        snapshot.begin(model, {})
    return len(made)


@pytest.mark.usefixtures("on_gpus")
def test_an_unchanged_buffer_is_copied_once() -> None:
    snapshot, model = StepSnapshot(), Masked()
    assert [copies_in(snapshot, model) for _ in range(3)] == [1, 0, 0]
    model.mask.mul_(2)
    assert [copies_in(snapshot, model) for _ in range(2)] == [1, 0]
    # another tensor in its place, with as few writes
    model.mask = torch.full((3,), 5.0)
    assert [copies_in(snapshot, model) for _ in range(2)] == [1, 0]


@pytest.mark.usefixtures("on_gpus")
def test_writes_of_a_step_are_undone_each_time() -> None:
    snapshot, model = StepSnapshot(), Masked()
    for _ in range(3):
        snapshot.begin(model, {})
        model.mask.add_(1)
        with pytest.raises(InvalidSpec, match="mask"):
            snapshot.check_buffers(1)
        snapshot.restore()
        assert model.mask.tolist() == [1.0, 1.0, 1.0]
    snapshot.begin(model, {})
    model.mask.add_(1)
    snapshot.settle()
    snapshot.commit()
    snapshot.begin(model, {})
    model.mask.zero_()
    snapshot.restore()
    assert model.mask.tolist() == [2.0, 2.0, 2.0]


def test_a_step_that_fails_while_the_optimizer_steps_leaves_no_whole_state() -> None:
    """Weights are those of no step until the step is committed."""
    snapshot, model = StepSnapshot(), nn.Linear(2, 2)
    snapshot.begin(model, dict(model.named_parameters()))
    assert snapshot.is_whole
    snapshot.settle()
    snapshot.restore()
    assert not snapshot.is_whole
    snapshot.begin(model, dict(model.named_parameters()))
    snapshot.settle()
    snapshot.commit()
    assert snapshot.is_whole


@torch.no_grad()
def test_weights_changed_by_updates_within_a_step_are_restored() -> None:
    """A weight that the script had written to before the update gets back its first content,
    too."""
    snapshot, model = StepSnapshot(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.clone()
    snapshot.begin(model, dict(model.named_parameters()), [optimizer])
    model.weight.add_(1)
    for _ in range(2):
        with snapshot.updating([optimizer], list(model.parameters())):
            model.weight.add_(1)
    model.weight.add_(1)
    snapshot.restore()
    assert snapshot.is_whole
    assert torch.equal(model.weight, before)


class Counting(torch.optim.Optimizer):
    """Optimizer that keeps a history in a list, and counts in its group."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            group["last"] = "step"
            for each in group["params"]:
                state = self.state[each]
                state.setdefault("history", [torch.zeros_like(each), 0])
                state.setdefault("latest", state["history"][0])
                state["history"][0] += 1
                state["history"][1] += 1


def test_an_update_keeps_objects_that_no_step_changes() -> None:
    """Locks and process groups cannot be copied; a parameter within the state stays the model's."""
    snapshot, model = StepSnapshot(), nn.Linear(2, 1, bias=False)
    optimizer = Counting(model.parameters())
    lock = threading.Lock()
    optimizer.param_groups[0]["lock"] = lock
    optimizer.state[model.weight]["views"] = [model.weight, {"lock": lock}]
    snapshot.begin(model, dict(model.named_parameters()), [optimizer])
    with snapshot.updating([optimizer], list(model.parameters())):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lock": lock})
    snapshot.restore()
    assert optimizer.param_groups[0]["lock"] is lock
    view, inner = optimizer.state[model.weight]["views"]
    assert view is model.weight and inner["lock"] is lock


def test_lists_and_settings_changed_by_updates_within_a_step_are_restored() -> None:
    """Contents that are changed in place are those from before the first update of the step."""
    snapshot, model = StepSnapshot(), nn.Linear(2, 1, bias=False)
    optimizer = Counting(model.parameters())
    parameters = dict(model.named_parameters())

    def step(*, fails: bool) -> None:
        snapshot.begin(model, parameters, [optimizer])
        for _ in range(2):
            with snapshot.updating([optimizer], list(model.parameters())):
                optimizer.step()
        if fails:
            snapshot.restore()
        else:
            snapshot.settle()
            snapshot.commit()

    step(fails=True)
    assert optimizer.param_groups[0].keys() == {"params", "num_steps"}
    for fails in (False, True, True, False, True):
        step(fails=fails)
    assert optimizer.param_groups[0]["num_steps"] == 4
    state = optimizer.state[model.weight]
    assert state["history"][0].tolist() == [[4.0, 4.0]] and state["history"][1] == 4
    assert state["latest"] is state["history"][0]
