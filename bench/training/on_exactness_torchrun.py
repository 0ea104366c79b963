"""The compared training for torchrun: on_exactness_torchrun.py DIRECTORY PAUSE_S EVERY_STEPS.

DistributedDataParallel: rank 0 saves a checkpoint every EVERY_STEPS steps, restarted workers load
the newest one, and the global batch is divided among any number of ranks with losses weighted by
samples, so that the result does not depend on that number.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from exactness import (
    leave_weights,
    load_checkpoint,
    loss_of,
    new_loader,
    new_model,
    new_optimizer,
    new_schedule,
    save_checkpoint,
    stops_at,
)
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import StepLog

TIMEOUT = timedelta(seconds=15)
"""Limit of the start of a process group: workers start up to 10 s apart on a busy machine. An agent
restarts its worker only if the worker fails, so workers that wait for a machine lost meanwhile have
to fail: by default they wait for 30 minutes."""


def main() -> None:
    directory, pause_s, every_steps = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    log = StepLog(directory)
    model = new_model()
    optimizer = new_optimizer(model)
    schedule = new_schedule(optimizer)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    step = load_checkpoint(directory, parts)
    ddp = DistributedDataParallel(model)
    # Agents count their own restarts, so that their counts may differ: rank 0 names the formation.
    formation = torch.tensor([time.monotonic_ns()])
    dist.broadcast(formation, 0)
    loader = new_loader()
    while stops_at(directory) != step:
        batch = loader.synchronous(step, rank, world_size)
        optimizer.zero_grad()
        loss = loss_of(ddp(batch.inputs), batch.targets)
        # DDP takes the mean over ranks; the loss is a mean over this rank's samples.
        (loss * batch.weight).backward()
        optimizer.step()
        schedule.step()
        time.sleep(pause_s)
        log.committed(formation=int(formation), world_size=world_size, step=step)
        step += 1
        if step % every_steps == 0 and rank == 0:
            save_checkpoint(directory, parts, step)
    if rank == 0:
        leave_weights(directory, step, model.state_dict())


if __name__ == "__main__":
    main()
