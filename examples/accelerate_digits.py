"""Handwritten digits with Hugging Face accelerate. The script does not use Shoal itself.

torchrun --rdzv-backend=shoal --rdzv-endpoint=HOST:7700 --rdzv-id=digits --nnodes=1:4 \
         --nproc-per-node=1 --max-restarts=3 examples/accelerate_digits.py CHECKPOINTS
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE = 12, 32

checkpoints = Path(sys.argv[1])
bunch = load_digits()
pixels = torch.tensor(bunch.data / 16, dtype=torch.float32)
digits = TensorDataset(pixels, torch.tensor(bunch.target))

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(digits, BATCH_SIZE, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

done = sorted(checkpoints.glob("epoch-*"))
if done:
    accelerator.load_state(str(done[-1]))
for epoch in range(len(done), EPOCHS):
    losses = []
    for images, labels in loader:
        loss = cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = accelerator.reduce(torch.stack(losses).mean(), "mean")
    ranks = accelerator.num_processes
    if accelerator.is_main_process:
        print(f"epoch {epoch} on {ranks} ranks: loss {mean:.4f}", flush=True)
    # Rename the checkpoint only once it is complete: a worker may be lost while it is written.
    accelerator.save_state(str(checkpoints / "unfinished"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (checkpoints / "unfinished").rename(checkpoints / f"epoch-{epoch:03d}")
    accelerator.wait_for_everyone()
accelerator.end_training()
