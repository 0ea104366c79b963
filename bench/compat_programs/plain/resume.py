"""A run that continues from the checkpoint that an earlier run wrote after some epochs."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, BATCH, FIRST_EPOCHS, EPOCHS = 1600, 32, 3, 12


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def trained():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, StepLR(optimizer, NUM_SAMPLES // BATCH, 0.8)


def write_checkpoint(path):
    """Write the checkpoint of a plain torch process after the first epochs."""
    torch.manual_seed(0)
    kept = model, optimizer, schedule = trained()
    for _ in range(FIRST_EPOCHS):
        for inputs, labels in DataLoader(samples(), BATCH):
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            schedule.step()
    unfinished = path.with_suffix(f".{os.getpid()}")
    torch.save([each.state_dict() for each in kept], unfinished)
    unfinished.rename(path)


def main():
    path = Path(sys.argv[1]).with_suffix(".checkpoint")
    if not path.exists():
        write_checkpoint(path)
    kept = model, optimizer, schedule = trained()
    for each, state in zip(kept, torch.load(path), strict=True):
        each.load_state_dict(state)
    loader = DataLoader(samples(), BATCH)
    for _ in range(FIRST_EPOCHS, EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
