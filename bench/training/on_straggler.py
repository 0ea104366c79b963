"""A worker with a pause in each step, for bench/stragglers.py:
on_straggler.py DIRECTORY MODE BOUND PAUSE_MS NUM_WORKERS.

It records each step and trains until it is killed.
"""

import sys
import time
from pathlib import Path

from torch.nn.functional import cross_entropy
from torch.optim import SGD
from workload import StepLog, new_model, samples

import shoal

BATCH_SIZE = 32
EPOCHS = 1_000_000


def main() -> None:
    directory, mode, bound, pause_ms, num_workers = sys.argv[1:]
    log = StepLog(Path(directory))
    strategy = shoal.AsyncSGD(
        consistency=mode, staleness_bound=int(bound) if mode == "ssp" else None
    )
    with shoal.join(desired_members=int(num_workers)) as session:
        model = new_model()
        session.distribute(model, SGD(model.parameters(), lr=1e-4), strategy)
        for batch in session.batches(samples(), global_batch_size=BATCH_SIZE, epochs=EPOCHS):
            with session.step():
                session.backward(cross_entropy(model(batch.inputs), batch.targets))
                time.sleep(float(pause_ms) / 1000)
            log.committed(formation=session.generation, world_size=session.world_size)


if __name__ == "__main__":
    main()
