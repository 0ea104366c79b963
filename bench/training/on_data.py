"""Steps, timed, with loading by other processes: on_data.py shoal|plain LOAD_MS PAUSE_MS RESULT.

With `shoal` a member of a session and `session.batches`, with `plain` torch's DataLoader; both with
two processes that load. Writes the seconds between steps into RESULT.
"""

import json
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import shoal

NUM_WORKERS, BATCH, NUM_STEPS, WIDTH = 2, 16, 360, 256
NUM_SAMPLES = NUM_STEPS * BATCH
"""One epoch: at its end a DataLoader has nothing on the way."""
WARM_UP = 40
"""More than the batches that are loaded ahead before the first step."""


class Loaded(Dataset[tuple[Tensor, Tensor]]):
    """Each sample takes a while to come, as from storage, and is then changed at random."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._load_s)
        sample = torch.full((WIDTH,), index / NUM_SAMPLES) + 0.1 * torch.randn(WIDTH)
        return sample, sample.roll(1)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def on_shoal(dataset: Loaded, pause_s: float) -> Iterator[float]:
    with shoal.join() as session:
        model = new_model()
        model, _ = session.distribute(model, new_optimizer(model))
        for batch in session.batches(
            dataset, global_batch_size=BATCH, epochs=1, num_workers=NUM_WORKERS
        ):
            with session.step():
                session.backward(mse_loss(model(batch.inputs), batch.targets))
                time.sleep(pause_s)
            yield time.perf_counter()


def on_torch(dataset: Loaded, pause_s: float) -> Iterator[float]:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    optimizer = new_optimizer(model)
    for inputs, targets in DataLoader(dataset, BATCH, shuffle=True, num_workers=NUM_WORKERS):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        time.sleep(pause_s)
        optimizer.step()
        yield time.perf_counter()
    dist.destroy_process_group()


def main() -> None:
    system, load_ms, pause_ms, result = sys.argv[1:]
    run = on_shoal if system == "shoal" else on_torch
    torch.set_num_threads(1)
    dataset = Loaded(float(load_ms) / 1000)
    ended = list(run(dataset, float(pause_ms) / 1000))[WARM_UP:]
    Path(result).write_text(json.dumps([after - before for before, after in pairwise(ended)]))


if __name__ == "__main__":
    main()
