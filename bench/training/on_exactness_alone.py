"""The compared training in one process: on_exactness_alone.py DIRECTORY PAUSE_S."""

import sys
import time
from pathlib import Path

import torch
from exactness import (
    leave_weights,
    new_loader,
    new_model,
    new_optimizer,
    new_schedule,
    stops_at,
    train_step,
)
from workload import StepLog


def main() -> None:
    directory, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    log = StepLog(directory)
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    loader = new_loader()
    step = 0
    while stops_at(directory) != step:
        train_step(model, optimizer, schedule, loader.synchronous(step, 0, 1))
        time.sleep(pause_s)
        log.committed(formation=0, world_size=1, step=step)
        step += 1
    leave_weights(directory, step, model.state_dict())


if __name__ == "__main__":
    main()
