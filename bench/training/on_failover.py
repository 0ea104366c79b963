"""A DDP worker for bench/failover.py: on_failover.py DIRECTORY. Records the number of each step."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from workload import GLOBAL_BATCH, PAUSE_S, new_model, samples

import shoal


def main() -> None:
    path = Path(sys.argv[1]) / f"numbers-{os.getpid()}"
    base = new_model()
    sgd = torch.optim.SGD(base.parameters(), lr=0.01, momentum=0.9)
    with path.open("w", buffering=1) as log, shoal.join() as session:
        model, _ = session.distribute(base, sgd)
        batches = session.batches(
            TensorDataset(*samples()), global_batch_size=GLOBAL_BATCH, epochs=1_000_000
        )
        for batch in batches:
            with session.step() as step:
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                time.sleep(PAUSE_S)
            if step.committed:
                log.write(json.dumps([session.generation, session.step_number]) + "\n")


if __name__ == "__main__":
    main()
