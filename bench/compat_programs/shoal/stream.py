"""An IterableDataset that reads logs, one after the other."""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

import shoal

NUM_LOGS, NUM_LINES, BATCH, EPOCHS = 12, 160, 32, 8


def read(number):
    """The samples of one log, from its beginning."""
    generator = torch.Generator().manual_seed(number)
    for _ in range(NUM_LINES):
        numbers = torch.randn(9, generator=generator)
        yield numbers[:8], numbers[8:]


class Logs(IterableDataset):
    def __iter__(self):
        for number in range(NUM_LOGS):
            yield from read(number)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logs = shoal.Shards([Logs()], lengths=[NUM_LOGS * NUM_LINES])
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(logs, global_batch_size=BATCH, epochs=EPOCHS, shuffle=False):
            with session.step():
                loss = mse_loss(model(batch.inputs), batch.targets)
                session.backward(loss)
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
