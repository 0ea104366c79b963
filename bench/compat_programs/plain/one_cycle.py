"""A learning rate and a momentum that go through one cycle, and gradients that are clipped."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, BATCH, EPOCHS, RATE = 1600, 32, 10, 0.1


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": weights, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9, nesterov=True)
    loader = DataLoader(samples(), BATCH)
    schedule = OneCycleLR(
        optimizer,
        [RATE, RATE / 2],
        epochs=EPOCHS,
        steps_per_epoch=len(loader),
        three_phase=True,
        base_momentum=0.8,
        max_momentum=0.95,
    )
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
