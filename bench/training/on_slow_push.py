"""Script that bench/push_compression.py runs under `shoal run`: COMPRESSION NUM_STEPS."""

import json
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import shoal

NUM_WARM = 3
HIDDEN = 1024


def wire_bytes() -> int:
    """Return the bytes sent over loopback since the namespace was created."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (lo,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(lo.split(":")[1].split()[8])


def main() -> None:
    name, num_steps = sys.argv[1], int(sys.argv[2])
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(64, HIDDEN), torch.nn.ReLU()),
        *(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU()),
        torch.nn.Linear(HIDDEN, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = shoal.AsyncSGD(compression=None if name == "none" else name)
    ended_s, wire = [], []
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy=strategy)
        batches = session.batches((images, labels), global_batch_size=32, epochs=100)
        for batch in islice(batches, NUM_WARM + num_steps):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
            ended_s.append(time.monotonic())
            wire.append(wire_bytes())
        sent = session.strategy.metrics().get("bytes_per_step")
    plain = sum(parameter.nbytes for parameter in model.parameters())
    steps = [b - a for a, b in zip(ended_s[NUM_WARM - 1 :], ended_s[NUM_WARM:], strict=False)]
    figures = {
        "step": median(steps),
        "wire": (wire[-1] - wire[NUM_WARM - 1]) / num_steps,
        "sent": plain if sent is None else sent,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
