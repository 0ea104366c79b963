"""A worker whose result is compared: on_exactness.py DIRECTORY STRATEGY [PAUSE_S [COPIES]].

Trains until the file `stop` names a step, and leaves the whole model in `weights.pt`.
"""

import sys
import time
from pathlib import Path

from exactness import (
    GLOBAL_BATCH,
    leave_weights,
    loss_of,
    new_model,
    new_optimizer,
    new_schedule,
    samples,
    stops_at,
)
from workload import StepLog

import shoal
from shoal.strategies import find_strategy

OPTIONS: dict[str, dict[str, int]] = {
    "tensor": {"min_split_bytes": 0},
    "hybrid": {"min_split_bytes": 0},
    "hsdp": {"shard": 2},
}
PAUSE_S = 0.01
"""Pause after each step, as for a device: limits the number of steps between two faults."""


def main() -> None:
    directory = Path(sys.argv[1])
    pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else PAUSE_S
    log = StepLog(directory)
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    options = dict(OPTIONS.get(sys.argv[2], {}))
    if len(sys.argv) > 4:
        options["copies"] = int(sys.argv[4])
    strategy = type(find_strategy(sys.argv[2]))(**options)
    with shoal.join() as session:
        session.register("schedule", schedule)
        session.distribute(model, optimizer, strategy)
        batches = session.batches(samples(), global_batch_size=GLOBAL_BATCH, epochs=1_000_000)
        for batch in batches:
            if stops_at(directory) == batch.step:
                break
            with session.step() as step:
                session.forward_backward(batch, loss_of)
                schedule.step()
            time.sleep(pause_s)
            if step.committed:
                log.committed(
                    formation=session.generation, world_size=session.world_size, step=batch.step
                )
        weights = session.state_dict()
        if session.rank == 0:
            leave_weights(directory, session.step_number, dict(weights))


if __name__ == "__main__":
    main()
