"""The digits under plain torchrun: torchrun --nproc-per-node 2 train_torchrun.py [STRATEGY]."""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import shoal

BATCH_SIZE, EPOCHS = 96, 10

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = shoal.distribute(model, optimizer, sys.argv[1] if sys.argv[1:] else "fsdp")

index, count = shoal.data_share(model)
for epoch in range(EPOCHS):
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    # Leave out an incomplete last batch: ranks would get shares of different sizes.
    for batch in order[: len(order) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE):
        mine = batch.tensor_split(count)[index]
        cross_entropy(model(images[mine]), labels[mine]).backward()
        shoal.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

with torch.no_grad():
    accuracy = float((model(images).argmax(dim=1) == labels).float().mean())
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.3f}")
dist.destroy_process_group()
