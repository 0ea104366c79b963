"""A worker for `shoal run` under any strategy: on_large.py DIRECTORY STRATEGY."""

import sys
from pathlib import Path

from large import GLOBAL_BATCH, new_model, new_optimizer, samples
from torch.nn.functional import mse_loss
from workload import StepLog

import shoal


def main() -> None:
    log = StepLog(Path(sys.argv[1]))
    model = new_model()
    with shoal.join() as session:
        session.distribute(model, new_optimizer(model), sys.argv[2])
        batches = session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=1_000_000)
        for batch in batches:
            with session.step() as step:
                session.forward_backward(batch, mse_loss)
            if step.committed:
                log.committed(
                    formation=session.generation, world_size=session.world_size, step=batch.step
                )


if __name__ == "__main__":
    main()
