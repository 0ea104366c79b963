"""The README's script: handwritten digits, with any number of workers.

shoal run -n 3 examples/train.py [ddp|async-sgd]
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import shoal

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with shoal.join() as session:
    strategy = sys.argv[1] if len(sys.argv) > 1 else "ddp"
    model, optimizer = session.distribute(model, optimizer, strategy=strategy)
    for batch in session.batches((images, labels), global_batch_size=96, epochs=40):
        with session.step():
            loss = cross_entropy(model(batch.inputs), batch.targets)
            session.backward(loss)
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    print(f"rank {session.rank}: {right:.1%} correct after {session.step_number} steps")
