"""Members whose shares of the last batch of an epoch are small, with layers that normalise."""

import time
from pathlib import Path
from typing import Any

import torch
from support.processes.ranks import Report
from torch import Tensor, nn

import shoal

NUM_SAMPLES, BATCH = 50, 12
SMALLEST = NUM_SAMPLES % BATCH


class Norms(nn.Module):
    """A BatchNorm of samples with one number per channel ("flat", "pixel") or several ("image"); it
    is in evaluation mode if "frozen"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.flat, self.images = nn.BatchNorm1d(3), nn.BatchNorm2d(3)
        self.kind = kind
        if kind != "flat":
            self.flat.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kind in ("flat", "frozen"):
            outputs: Tensor = self.flat(inputs)
            return outputs + 0 * self.images.weight + 0 * self.images.bias
        sides = 2 if self.kind == "image" else 1
        images = inputs[:, :, None, None].expand(-1, -1, sides, sides)
        places = torch.arange(float(sides)) + 1
        normed: Tensor = self.images(images * places)
        return normed.mean((2, 3)) + 0 * self.flat.weight + 0 * self.flat.bias


def train(
    coordinator: str,
    job: str,
    kind: str,
    *,
    num_steps: int,
    max_members: int,
    drop_last: bool = False,
    sync_batchnorm: bool = False,
) -> None:
    model: Any = Norms(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with shoal.join(job, coordinator=coordinator, max_members=max_members) as session:
        model, _ = session.distribute(model, optimizer, sync_batchnorm=sync_batchnorm)
        inputs = torch.randn(NUM_SAMPLES, 3)
        for batch in session.batches(inputs, global_batch_size=BATCH, drop_last=drop_last):
            with session.step():
                session.backward(model(batch.inputs).square().mean())
            if session.step_number == num_steps:
                break


def train_member(report: Report, coordinator: str, job: str, gate: str) -> None:
    """Train until the gate is opened, and for an epoch after that."""
    model: Any = Norms("flat")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with shoal.join(job, coordinator=coordinator, max_members=3) as session:
        model, _ = session.distribute(model, optimizer)
        left = 0
        for batch in session.batches(
            torch.ones(NUM_SAMPLES, 3), global_batch_size=BATCH, epochs=10_000
        ):
            with session.step():
                session.backward(model(batch.inputs).square().mean())
            report("stepped")
            time.sleep(0.01)
            left += Path(gate).exists()
            if left > NUM_SAMPLES // BATCH + 1:
                session.stop("the gate was opened")
        report("finished", steps=session.step_number)
