"""An async-sgd worker whose updates can be counted: on_counted_samples.py DIRECTORY PAUSE_S.

Each sample adds 1 to a weight of its own, so that the weights show how often each sample was used.
The worker records the samples of each acknowledged push (`samples-PID`), trains until a file `stop`
exists, and leaves the weights in `weights-PID.pt`.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from workload import StepLog

import shoal

NUM_SAMPLES, GLOBAL_BATCH = 4096, 64


class Counter(nn.Module):
    """A weight for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, samples: Tensor) -> Tensor:
        return self.times[samples]


def main() -> None:
    directory, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    steps = StepLog(directory)
    model: nn.Module = Counter()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    samples = torch.arange(NUM_SAMPLES)
    own = directory / f"samples-{os.getpid()}"
    with own.open("w", buffering=1) as log, shoal.join() as session:
        # The rate is not lowered for a stale push: each sample adds exactly 1.
        strategy = shoal.AsyncSGD(staleness="none")
        model, optimizer = session.distribute(model, optimizer, strategy)
        batches = session.batches(
            (samples, samples), global_batch_size=GLOBAL_BATCH, epochs=1_000_000
        )
        for number, batch in enumerate(batches):
            if (directory / "stop").exists():
                break
            with session.step() as step:
                session.backward(-model(batch.inputs).sum())
            if step.committed:
                log.write(json.dumps(batch.inputs.tolist()) + "\n")
                steps.committed(
                    formation=session.generation, world_size=session.world_size, step=number
                )
            time.sleep(pause_s)
        weights = session.state_dict()
        torch.save(weights["times"], directory / f"draft-{os.getpid()}")
        (directory / f"draft-{os.getpid()}").rename(directory / f"weights-{os.getpid()}.pt")


if __name__ == "__main__":
    main()
