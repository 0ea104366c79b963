"""Members whose batches are loaded by processes of a DataLoader, with augmentation."""

import multiprocessing
import random
from dataclasses import dataclass
from typing import Any

import torch
from support.processes.ranks import Report
from support.training.elastic_bodies import (
    EPOCHS,
    NUM_SAMPLES,
    Elastic,
    build,
    is_over,
    numbers,
    order,
    strategy_of,
)
from support.training.rank_bodies import session_of
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from shoal.data.batches import Loader


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples to which random noise is added each time they are loaded."""

    def __init__(self) -> None:
        self.inputs, self.targets = numbers()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(20) * random.random()
        return self.inputs[index] + noise, self.targets[index]


@dataclass(frozen=True, kw_only=True)
class LoadingRun(Elastic):
    """Run of one member."""

    num_workers: int = 2


def train(report: Report, run: LoadingRun) -> None:
    """Train until the step in the stop file, then report the whole model."""
    model, optimizer = build(run.optimizer, "layers")
    with session_of(run) as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy_of(run))
        loader = DataLoader(Augmented(), run.batch_size, shuffle=True, num_workers=run.num_workers)
        batches = session.batches(loader, epochs=EPOCHS)
        assert len(batches) == order(run.batch_size).num_steps
        for batch in batches:
            if is_over(run.stop_file, batch.step):
                break
            loads = [each.pid for each in multiprocessing.active_children()]
            tried = {"step": batch.step, "generation": session.generation}
            report("tried", **tried, loads=loads)
            with session.step() as step:
                session.forward_backward(batch, cross_entropy)
            if step.committed:
                report("committed", **tried)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", step=session.step_number, weights=weights)


def one_process(run: LoadingRun, num_steps: int) -> dict[str, Any]:
    """Return the weights after the same steps in plain torch, without loading processes."""
    model, optimizer = build(run.optimizer, "layers")
    loader = Loader(Augmented(), order(run.batch_size))
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}
