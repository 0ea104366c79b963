"""A DDP worker for `shoal run`: on_shoal.py DIRECTORY."""

import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from workload import GLOBAL_BATCH, PAUSE_S, StepLog, new_model, samples

import shoal


def main() -> None:
    log = StepLog(Path(sys.argv[1]))
    base = new_model()
    sgd = torch.optim.SGD(base.parameters(), lr=0.01, momentum=0.9)
    with shoal.join() as session:
        model, _ = session.distribute(base, sgd)
        batches = session.batches(
            TensorDataset(*samples()), global_batch_size=GLOBAL_BATCH, epochs=1_000_000
        )
        for batch in batches:
            with session.step() as step:
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                time.sleep(PAUSE_S)
            if step.committed:
                log.committed(formation=session.generation, world_size=session.world_size)


if __name__ == "__main__":
    main()
