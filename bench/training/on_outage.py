"""A worker for bench/outage.py: on_outage.py DIRECTORY STRATEGY. Records each step."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import shoal

NUM_SAMPLES, NUM_FEATURES, BATCH = 200_000, 16, 16
PAUSE_S = 0.02
"""Pause of each step after its short computation, as for a device: the cores are not the limit."""


def main() -> None:
    directory, strategy = Path(sys.argv[1]), sys.argv[2]
    torch.manual_seed(0)
    base = torch.nn.Linear(NUM_FEATURES, 1)
    sgd = torch.optim.SGD(base.parameters(), lr=0.01)
    inputs = torch.ones(NUM_SAMPLES, NUM_FEATURES)
    path = directory / f"{strategy}-{os.getpid()}"
    with path.open("w", buffering=1) as log, shoal.join() as session:
        model, _ = session.distribute(base, sgd, strategy=strategy)
        data = TensorDataset(inputs, torch.ones(NUM_SAMPLES, 1))
        # Samples are in order, so that the first index of a batch identifies the batch.
        batches = session.batches(data, global_batch_size=BATCH, epochs=10_000, shuffle=False)
        for batch in batches:
            with session.step() as step:
                session.backward(mse_loss(model(batch.inputs), batch.targets))
                time.sleep(PAUSE_S)
            if step.committed:
                first = batch.indices[0] if batch.indices else -1
                line = [time.monotonic(), session.generation, batch.step, batch.epoch, first]
                log.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
