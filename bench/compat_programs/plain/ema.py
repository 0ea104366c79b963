"""An average of the weights that is evaluated, and a schedule."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, BATCH, EPOCHS = 1600, 32, 10


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    schedule = CosineAnnealingLR(optimizer, EPOCHS * NUM_SAMPLES // BATCH)
    loader = DataLoader(samples(), BATCH)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
    torch.save(average.module.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
