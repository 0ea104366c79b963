"""torch.compile, with a validation after each epoch that may end the training early."""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import shoal

BATCH, EPOCHS, ENOUGH = 32, 10, 1e-9


def samples(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    model = torch.compile(nn.Sequential(model, nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, held_out = DataLoader(samples(1, 1600), BATCH), samples(2, 200)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(loader, epochs=EPOCHS):
            with session.step() as step:
                loss = mse_loss(model(batch.inputs), batch.targets)
                session.backward(loss)
            if step.committed and session.step_number % len(loader) == 0:
                with torch.no_grad():
                    if mse_loss(model(held_out.tensors[0]), held_out.tensors[1]) < ENOUGH:
                        session.stop("it is good enough")
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
