"""The compared training for torchft: on_exactness_torchft.py DIRECTORY PAUSE_S NAME.

One replica group of one worker on Gloo. torchft's documentation gives every group samples of its
own (`torchft.data.DistributedSampler`); samples of an absent group are never used. To get the
result of one process, the groups of each quorum divide the global batch here, with losses weighted
by samples. DIRECTORY/lighthouse has the lighthouse's address.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from exactness import (
    leave_weights,
    loss_of,
    new_loader,
    new_model,
    new_optimizer,
    new_schedule,
    stops_at,
)
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from workload import StepLog

TIMEOUT = timedelta(seconds=5)


def main() -> None:
    directory, pause_s, name = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    log = StepLog(directory)
    base = new_model()
    sgd = new_optimizer(base)
    schedule = new_schedule(sgd)
    parts = {"model": base, "optimizer": sgd, "schedule": schedule}

    def load(state: dict[str, dict[str, object]]) -> None:
        for key, part in parts.items():
            part.load_state_dict(state[key])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {key: part.state_dict() for key, part in parts.items()},
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=(directory / "lighthouse").read_text(),
        replica_id=name,
        hostname="127.0.0.1",
        # Every replica starts from the same weights.
        init_sync=False,
    )
    model, optimizer = DistributedDataParallel(manager, base), Optimizer(manager, sgd)
    loader = new_loader()
    while stops_at(directory) != manager.current_step():
        optimizer.zero_grad()  # starts the quorum
        world_size = manager.num_participants()
        step = manager.current_step()
        # A group that is healing takes part with zeros.
        rank = manager.participating_rank() if manager.is_participating() else 0
        batch = loader.synchronous(step, rank or 0, world_size)
        loss = loss_of(model(batch.inputs), batch.targets)
        # torchft takes the mean over groups; the loss is a mean over this group's samples.
        (loss * batch.weight).backward()
        optimizer.step()
        if manager.current_step() > step:
            schedule.step()
            time.sleep(pause_s)
            log.committed(formation=manager._quorum_id, world_size=world_size, step=step)
    leave_weights(directory, manager.current_step(), base.state_dict())


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
