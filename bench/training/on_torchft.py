"""torchft's part: `on_torchft.py lighthouse DIRECTORY`, `on_torchft.py worker DIRECTORY NUMBER`.

One replica group is one worker on Gloo. It follows torchft's own train_ddp.py: with its DDP, its
optimizer wrapper, and a process group that it reconfigures when the quorum changes.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from workload import GLOBAL_BATCH, PAUSE_S, StepLog, new_model, samples

HEARTBEAT_TIMEOUT_MS, JOIN_TIMEOUT_MS, TICK_MS = 300, 200, 10
"""Tuned; by default 5000, 60000 and 100."""
NUM_WORKERS = 4


def lighthouse(directory: Path) -> None:
    """Serve until killed; write the address to DIRECTORY/lighthouse."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    port = server.address().rpartition(":")[2]
    unfinished = directory / "lighthouse.new"
    unfinished.write_text(f"http://127.0.0.1:{port}")
    unfinished.rename(directory / "lighthouse")
    while True:
        time.sleep(3600)


def worker(directory: Path, number: int) -> None:
    log = StepLog(directory)
    base = new_model()
    sgd = torch.optim.SGD(base.parameters(), lr=0.01, momentum=0.9)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        base.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": base.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=(directory / "lighthouse").read_text(),
        replica_id=f"replica-{number}",
        hostname="127.0.0.1",
        # Every replica starts from the same weights.
        init_sync=False,
    )
    model, optimizer = DistributedDataParallel(manager, base), Optimizer(manager, sgd)
    inputs, targets = samples()
    share = GLOBAL_BATCH // NUM_WORKERS
    start = number * share
    while True:
        optimizer.zero_grad()
        chosen = slice(start, start + share)
        cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        time.sleep(PAUSE_S)
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            world_size = manager.num_participants()
            log.committed(formation=world_size, world_size=world_size)
        start = (start + GLOBAL_BATCH) % len(inputs)


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(Path(sys.argv[2]))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        worker(Path(sys.argv[2]), int(sys.argv[3]))
