"""accelerate's loop: accumulated gradients, clipping and a schedule."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.integrations.accelerate import SessionAccelerator

NUM_SAMPLES, BATCH, PARTS, EPOCHS = 1280, 16, 2, 8


def samples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


def main():
    torch.manual_seed(0)
    with shoal.join() as session:
        accelerator = SessionAccelerator(
            session, epochs=EPOCHS, gradient_accumulation_steps=PARTS, cpu=True
        )
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = CosineAnnealingLR(optimizer, EPOCHS * NUM_SAMPLES // (BATCH * PARTS))
        loader = DataLoader(samples(), BATCH)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        for _ in range(EPOCHS):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        if session.is_first:
            torch.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
