"""Bodies of members that train on shards, which a DataLoader's processes read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from support.processes.ranks import Report
from support.training.elastic_bodies import (
    EPOCHS,
    NUM_SAMPLES,
    Elastic,
    build,
    checkpoints_of,
    is_over,
    noted_share,
    numbers,
    strategy_of,
)
from support.training.rank_bodies import session_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, get_worker_info

import shoal
from shoal.data.batch_options import BatchOptions
from shoal.data.batches import Loader

LENGTHS = [20, 0, 31, 7, 1, 18, 24]
assert sum(LENGTHS) == NUM_SAMPLES


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Dataset of some of the samples, which divides them among the loader's processes."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = numbers()
        inputs = inputs.double()
        torch.rand(self.stop)  # changes the generator of the reading process
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for index in range(self.start + first, self.stop, step):
            yield inputs[index], targets[index]


def noisy(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add random noise, drawn each time the sample is loaded."""
    inputs, target = sample
    return inputs + 0.1 * torch.rand(inputs.shape), target


def streams() -> shoal.Shards:
    stops = torch.tensor(LENGTHS).cumsum(0).tolist()
    shards = [Stream(stop - length, stop) for stop, length in zip(stops, LENGTHS, strict=True)]
    return shoal.Shards(shards, lengths=LENGTHS, decode=noisy, columns=3, turns=2, shuffle_buffer=8)


def loader_of(batch_size: int) -> Loader:
    """Make the loader of one process."""
    options = BatchOptions.of(
        global_batch_size=batch_size,
        epochs=EPOCHS,
        seed=None,
        shuffle=None,
        collate=None,
        options={},
    )
    return options.loader(streams())


@dataclass(frozen=True, kw_only=True)
class ShardRun(Elastic):
    """A member's run."""

    num_workers: int = 2


def in_float64(run: ShardRun) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build in float64, in which rounding stays below any tolerance over any number of steps."""
    model, optimizer = build(run.optimizer, "layers")
    return model.double(), optimizer


def train(report: Report, run: ShardRun) -> None:
    """Train until the step in `stop_file`, and report the whole model."""
    model, optimizer = in_float64(run)
    with session_of(run) as session:
        model, optimizer = session.distribute(
            model, optimizer, strategy=strategy_of(run), checkpoints=checkpoints_of(run)
        )
        last_share = noted_share(session)
        batches = session.batches(
            streams(),
            global_batch_size=run.batch_size,
            epochs=EPOCHS,
            num_workers=run.num_workers,
        )
        for batch in batches:
            if is_over(run.stop_file, batch.step):
                break
            tried = {"step": batch.step, "generation": session.generation}
            share = last_share()
            report("tried", **tried, share=share, epoch=batch.epoch, indices=batch.indices)
            with session.step() as step:
                session.forward_backward(batch, cross_entropy)
            if step.committed:
                report("committed", **tried)
        weights = {name: tensor.tolist() for name, tensor in session.state_dict().items()}
        report("finished", step=session.step_number, weights=weights)


def one_process(run: ShardRun, num_steps: int) -> dict[str, Any]:
    """Return the weights after the same steps in plain torch."""
    model, optimizer = in_float64(run)
    loader = loader_of(run.batch_size)
    for step in range(num_steps):
        batch = loader.synchronous(step, 0, 1)
        optimizer.zero_grad()
        cross_entropy(model(batch.inputs), batch.targets).backward()
        optimizer.step()
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}
