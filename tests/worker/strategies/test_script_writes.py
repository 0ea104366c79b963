"""What a script writes to weights and buffers in a step is taken back if it does not happen."""

from collections.abc import Callable

import pytest
import torch
from support.collectives.strategy_runs import Run, entered
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.backends.in_memory.run import run_in_memory
from shoal.strategies.synchronous.strategy import SynchronousStrategy

from . import test_equality as equality

NUM_BEFORE = 3
"""Steps that the script writes in, before the one that does not happen."""
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor")
Writes = Callable[[nn.Module], None]


class WithTeacher(equality.Net):
    """Beside what is trained, weights that follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 7).requires_grad_(False)
        self.register_buffer("heat", torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            # Another tensor in its place, as scripts write it.
            self.heat = self.heat * 0.5
        return super().forward(inputs) * self.get_buffer("heat")


def build(seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = WithTeacher()
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def run() -> Run:
    return Run(build=build, loader=equality.loader, loss=equality.loss)


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """As sharpness-aware minimisation does between its two passes."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1)


def follow(model: nn.Module) -> None:
    """As a teacher does, past what torch counts."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data.mul_(0.9)


def nothing(_: nn.Module) -> None:
    """A script like most."""


def undone(name: str, writes: Writes, num_before: int) -> tuple[dict[str, Tensor], ...]:
    """The weights before a step that did not happen, and behind it; and whether they are whole."""
    strategy = equality.made(name, 2)()
    assert isinstance(strategy, SynchronousStrategy)
    share = entered(run(), strategy)
    batches = equality.loader()
    for step in range(num_before):
        batch = batches.synchronous(step, *share)
        strategy.begin_step()
        writes(strategy.module)
        strategy.forward_backward(batch.inputs, batch.targets, equality.loss, batch.weight)
        strategy.end_step(lambda: None)
    before = {key: tensor.clone() for key, tensor in strategy.state_dict().items()}
    batch = batches.synchronous(num_before, *share)
    strategy.begin_step()
    strategy.forward_backward(batch.inputs, batch.targets, equality.loss, batch.weight)
    writes(strategy.module)
    strategy.withdraw_step()
    behind = {key: tensor.clone() for key, tensor in strategy.state_dict().items()}
    whole = {"whole": torch.tensor(strategy._passes.is_whole)}
    strategy.close()
    return before, behind, whole


@pytest.mark.parametrize("writes", [perturb, follow, nothing])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_are_as_before_the_step(strategy: str, writes: Writes) -> None:
    for before, behind, whole in run_in_memory(undone, 2, strategy, writes, NUM_BEFORE):
        assert whole["whole"]
        assert before.keys() == behind.keys()
        assert all(torch.equal(before[key], behind[key]) for key in before)
        assert float(before["heat"]) == 0.5**NUM_BEFORE


@pytest.mark.parametrize("writes", [perturb, follow])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_cannot_be_taken_back_is_no_state(strategy: str, writes: Writes) -> None:
    """In the first step that a script writes in there is no copy: the member does not claim to hold
    the state of the last committed step."""
    for *_, whole in run_in_memory(undone, 2, strategy, writes, 0):
        assert not whole["whole"]
