"""Timed blocks of steps, with samples loaded by other processes:

    on_data.py shoal|plain LOAD_MS PAUSE_MS DESCRIPTOR BLOCKS SKIPPED TIMED

`shoal`: a member of a session with `session.batches`; `plain`: torch's DataLoader. Both have two
processes that load. The last four arguments are those of `blocks.Blocks`.
"""

import sys
import time

import torch
import torch.distributed as dist
from blocks import Blocks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import shoal

NUM_WORKERS, BATCH, WIDTH = 2, 16, 256


class Loaded(Dataset[tuple[Tensor, Tensor]]):
    """A dataset whose samples take time to load, as from storage, and are augmented at random."""

    def __init__(self, load_s: float, num_samples: int) -> None:
        self._load_s, self._num_samples = load_s, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._load_s)
        sample = torch.full((WIDTH,), index / len(self)) + 0.1 * torch.randn(WIDTH)
        return sample, sample.roll(1)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def on_shoal(dataset: Loaded, pause_s: float, blocks: Blocks) -> None:
    with shoal.join() as session:
        model = new_model()
        model, _ = session.distribute(model, new_optimizer(model))
        for batch in session.batches(
            dataset, global_batch_size=BATCH, epochs=1, num_workers=NUM_WORKERS
        ):
            blocks.before_step()
            with session.step():
                session.backward(mse_loss(model(batch.inputs), batch.targets))
                time.sleep(pause_s)
            blocks.after_step()


def on_torch(dataset: Loaded, pause_s: float, blocks: Blocks) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    optimizer = new_optimizer(model)
    for inputs, targets in DataLoader(dataset, BATCH, shuffle=True, num_workers=NUM_WORKERS):
        blocks.before_step()
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        time.sleep(pause_s)
        optimizer.step()
        blocks.after_step()
    dist.destroy_process_group()


def main() -> None:
    system, load_ms, pause_ms, *numbers = sys.argv[1:]
    run = on_shoal if system == "shoal" else on_torch
    torch.set_num_threads(1)
    blocks = Blocks(*map(int, numbers))
    # One epoch: at the end of an epoch, a DataLoader has no batch prefetched.
    run(Loaded(float(load_ms) / 1000, blocks.num_steps * BATCH), float(pause_ms) / 1000, blocks)


if __name__ == "__main__":
    main()
