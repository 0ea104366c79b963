"""Warnings, by name, for buffers that forward passes compute from a member's own samples."""

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from support.collectives.strategy_runs import Run, entered, take_step
from support.training import equality
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shoal.backends.in_memory.run import run_in_memory


class Counting(nn.Module):
    """A model that keeps the last sample it has seen in a queue, counts its passes and normalises
    its inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.norm, self.kind = equality.Net(), nn.BatchNorm1d(6), kind
        self.register_buffer("queue", torch.zeros(6))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        self.get_buffer("passes").add_(1)
        if self.kind == "by samples":
            self.get_buffer("queue").copy_(inputs[-1].detach())
        outputs: Tensor = self.net(self.norm(inputs))
        return outputs


def build(kind: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Counting(kind)
    return model, SGD(model.parameters(), lr=0.05)


def take_steps(name: str, kind: str) -> None:
    run = Run(build=lambda _: build(kind), loader=equality.loader, loss=equality.loss)
    strategy = equality.made(name, 2)()
    share = entered(run, strategy)
    for step in range(5):
        take_step(strategy, equality.loader().synchronous(step, *share), equality.loss)
    strategy.close()


def warnings_of(name: str, kind: str) -> list[Any]:
    with capture_logs() as logs:
        run_in_memory(take_steps, 2, name, kind)
    return [each["buffers"] for each in logs if each["event"] == "buffers_depend_on_members"]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_buffer_computed_from_samples_is_warned_of_once(strategy: str) -> None:
    assert warnings_of(strategy, "by samples") == ["queue"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_that_are_equal_on_all_members_cause_no_warning(strategy: str) -> None:
    assert not warnings_of(strategy, "by passes")
