"""A DDP worker for torchrun: on_torchrun.py DIRECTORY. It starts over when torchrun restarts it.

A real script would load a checkpoint then; this one does not spend that time.
"""

import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from workload import GLOBAL_BATCH, PAUSE_S, StepLog, new_model, samples


def main() -> None:
    dist.init_process_group("gloo")
    log = StepLog(Path(sys.argv[1]))
    model = DistributedDataParallel(new_model())
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, targets = samples()
    world_size = dist.get_world_size()
    share = GLOBAL_BATCH // world_size
    start = dist.get_rank() * share
    # Agents count their own restarts, so that their counts may differ: rank 0 names the formation.
    formation = torch.tensor([time.monotonic_ns()])
    dist.broadcast(formation, 0)
    while True:
        sgd.zero_grad()
        chosen = slice(start, start + share)
        cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        time.sleep(PAUSE_S)
        sgd.step()
        log.committed(formation=int(formation), world_size=world_size)
        start = (start + GLOBAL_BATCH) % len(inputs)


if __name__ == "__main__":
    main()
