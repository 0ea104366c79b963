"""Bodies of members that write to weights and buffers within a step, in which one is killed."""

import copy
import os
import signal
from typing import Any

import torch
from support.processes.ranks import Report
from support.training import elastic_bodies
from support.training.elastic_bodies import Elastic, order
from support.training.elastic_bodies import numbers as data
from support.training.rank_bodies import session_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.data.batches import Loader

RADIUS, DECAY = 0.5, 0.8


class Followed(nn.Module):
    """A model with trained weights, weights that follow them, and a count of passes, on all of
    which its outputs depend."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(20, 5)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        # Replaces the tensor.
        self.count = self.count + 1
        outputs: Tensor = self.student(inputs) * (1 + self.count / 50) - self.teacher(inputs) / 2
        return outputs

    def follow(self) -> None:
        """Update the following weights without torch's version counters."""
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data.mul_(DECAY).add_(other.data, alpha=1 - DECAY)


def build() -> tuple[Followed, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Followed()
    return model, torch.optim.SGD(model.student.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def perturbed(model: Followed) -> list[Tensor]:
    """Move the weights uphill and drop the gradients; return the changes."""
    changes = []
    for parameter in model.student.parameters():
        assert parameter.grad is not None
        changes.append(parameter.grad * RADIUS)
        parameter.add_(changes[-1])
        parameter.grad = None
    return changes


@torch.no_grad()
def move_back(model: Followed, changes: list[Tensor]) -> None:
    for parameter, change in zip(model.student.parameters(), changes, strict=True):
        parameter.sub_(change)


def train(report: Report, run: Elastic) -> None:
    """Train one epoch of sharpness-aware minimisation. With a `fault` the member is killed in the
    middle of step `at_step`."""
    made, optimizer = build()
    with session_of(run) as session:
        model: Any
        model, optimizer = session.distribute(
            made, optimizer, strategy=elastic_bodies.strategy_of(run)
        )
        for batch in session.batches(data(), global_batch_size=run.batch_size):
            with session.step():
                model.follow()
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                changes = perturbed(model)
                if run.fault and batch.step == run.at_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                move_back(model, changes)
        state = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", step=session.step_number, state=state)


def one_process(run: Elastic, num_steps: int) -> dict[str, Tensor]:
    """Train the same steps in plain torch; return the state."""
    model, optimizer = build()
    loader = Loader(data(), order(run.batch_size))
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        model.follow()
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        changes = perturbed(model)
        cross_entropy(model(batch.inputs), batch.targets).backward()
        move_back(model, changes)
        optimizer.step()
    return model.state_dict()
