"""Sharpness-aware minimisation: two passes a step, the second one where the loss is worse."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal

NUM_SAMPLES, BATCH, EPOCHS, RHO = 1600, 32, 8, 0.05


@torch.no_grad()
def climb(model):
    """Move the weights to the worst loss nearby, and return the moves."""
    gradients = [p.grad for p in model.parameters()]
    scale = RHO / torch.stack([each.norm() for each in gradients]).norm()
    moved = [each * scale for each in gradients]
    for parameter, by in zip(model.parameters(), moved, strict=True):
        parameter.add_(by)
    model.zero_grad()
    return moved


@torch.no_grad()
def descend(model, moved):
    for parameter, by in zip(model.parameters(), moved, strict=True):
        parameter.sub_(by)


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(samples(), BATCH)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer)
        for batch in session.batches(loader, epochs=EPOCHS):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                moved = climb(model)
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                descend(model, moved)
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
