"""fully_shard under torchrun, with a checkpoint on disk: on_torchrun_sharded.py DIRECTORY.

Workers write a checkpoint every ten steps, the longest interval at which Shoal copies, and load the
newest one after a restart.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from large import GLOBAL_BATCH, new_model, new_optimizer, samples
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from workload import StepLog

EVERY_STEPS = 10


def main() -> None:
    dist.init_process_group("gloo")
    directory = Path(sys.argv[1])
    log = StepLog(directory)
    model = new_model()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = new_optimizer(model)
    inputs, targets = samples()
    world_size = dist.get_world_size()
    share = GLOBAL_BATCH // world_size
    step = load(directory, model, optimizer)
    formation = torch.tensor([time.monotonic_ns()])
    dist.broadcast(formation, 0)
    while True:
        start = (step * GLOBAL_BATCH + dist.get_rank() * share) % len(inputs)
        optimizer.zero_grad()
        mse_loss(model(inputs[start : start + share]), targets[start : start + share]).backward()
        optimizer.step()
        step += 1
        log.committed(formation=int(formation), world_size=world_size, step=step)
        if step % EVERY_STEPS == 0:
            save(directory, model, optimizer, step)


def save(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=directory / f"draft-{step}")
    if dist.get_rank() == 0:
        (directory / f"draft-{step}").rename(directory / f"step-{step:08d}")
    dist.barrier()


def load(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint and return its step; return 0 if there is none."""
    found = sorted(directory.glob("step-????????"))
    if not found:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    dcp.load(state, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(found[-1].name.removeprefix("step-"))


if __name__ == "__main__":
    main()
