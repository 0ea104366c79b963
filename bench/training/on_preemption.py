"""A worker that is preempted: on_preemption.py DIRECTORY STRATEGY.

Writes a checkpoint every EVERY_STEPS steps (not async-sgd, whose state is on servers). They are so
rare that a restart loses many steps unless another one was written at the notice.
"""

import sys
import time
from pathlib import Path

from exactness import GLOBAL_BATCH, NUM_SAMPLES, loss_of, new_model, new_optimizer, samples
from workload import StepLog

import shoal
from shoal.strategies import find_strategy

OPTIONS = {"tensor": {"min_split_bytes": 0}}
EVERY_STEPS = 1000
PAUSE_S = 0.01


def main() -> None:
    directory, name = Path(sys.argv[1]), sys.argv[2]
    log, model = StepLog(directory), new_model()
    strategy = type(find_strategy(name))(**OPTIONS.get(name, {}))
    # Parameter servers hold the state of an asynchronous job.
    folder, of_servers = directory / "checkpoints", name == "async-sgd"
    keeps = None if of_servers else shoal.Checkpoints(folder, every_steps=EVERY_STEPS)
    with shoal.join() as session:
        session.distribute(model, new_optimizer(model), strategy, checkpoints=keeps)
        for batch in session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=1_000_000):
            with session.step() as step:
                session.forward_backward(batch, loss_of)
            if step.committed:
                world = session.world_size
                # Asynchronous workers count their own steps: the first sample identifies a batch.
                first = batch.epoch * NUM_SAMPLES + batch.indices[0] if of_servers else batch.step
                log.committed(formation=session.generation, world_size=world, step=first)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
