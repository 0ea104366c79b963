"""A training script for torchrun whose nodes may end one by one, as it has only one collective.

Run with a directory. A worker of the node NODE (an environment variable) writes a line of JSON for
each step to a file of its own there. It ends once the directory holds a file named "done-NODE", or
fails once it holds one named "fail-NODE-RESTARTS".
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

STEP_S = 0.05


def main() -> None:
    directory, node = Path(sys.argv[1]), os.environ["NODE"]
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    world = torch.ones(())
    dist.all_reduce(world)
    line = {
        "pid": os.getpid(),
        "agent": os.getppid(),
        "node": node,
        "rank": dist.get_rank(),
        "world": int(world),
        "restarts": restarts,
    }
    dist.destroy_process_group()
    with (directory / f"steps-{os.getpid()}").open("a", buffering=1) as steps:
        while not (directory / f"done-{node}").exists():
            print(json.dumps({**line, "at_s": time.time()}), file=steps)
            if (directory / f"fail-{node}-{restarts}").exists():
                raise SystemExit(3)
            time.sleep(STEP_S)  # the work of a step


if __name__ == "__main__":
    main()
