"""A worker whose result is compared: on_exactness.py DIRECTORY STRATEGY.

Trains until the file `stop` names a step, and leaves the whole model in `weights.pt`.
"""

import sys
from pathlib import Path

import torch
from exactness import GLOBAL_BATCH, new_model, new_optimizer, samples
from torch.nn.functional import cross_entropy
from workload import StepLog

import shoal


def main() -> None:
    directory = Path(sys.argv[1])
    log, stop = StepLog(directory), directory / "stop"
    model = new_model()
    with shoal.join() as session:
        session.distribute(model, new_optimizer(model), sys.argv[2])
        batches = session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=1_000_000)
        for batch in batches:
            if stop.exists() and batch.step == int(stop.read_text()):
                break
            with session.step() as step:
                session.forward_backward(batch, cross_entropy)
            if step.committed:
                log.committed(
                    formation=session.generation, world_size=session.world_size, step=batch.step
                )
        weights = session.state_dict()
        if session.rank == 0:
            torch.save({"step": session.step_number, "weights": dict(weights)}, directory / "draft")
            (directory / "draft").rename(directory / "weights.pt")


if __name__ == "__main__":
    main()
