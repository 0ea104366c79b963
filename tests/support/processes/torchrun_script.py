"""A training script for torchrun that knows nothing of Shoal: sums ones over all ranks.

Run with a directory. Every rank writes a line of JSON for each step to a file of its own there;
all end together once the directory holds a file named "stop", or fail once it holds one named
"fail-RANK-RESTARTS".
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
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (directory / f"steps-{os.getpid()}").open("a", buffering=1) as steps:
        while True:
            sums = torch.tensor([1.0, float((directory / "stop").exists())])
            dist.all_reduce(sums)
            line = {
                "at_s": time.time(),
                "pid": os.getpid(),
                "agent": os.getppid(),
                "rank": rank,
                "world": int(sums[0]),
                "restarts": restarts,
                "port": os.environ["MASTER_PORT"],
            }
            print(json.dumps(line), file=steps)
            if sums[1] > 0:
                break
            if (directory / f"fail-{rank}-{restarts}").exists():
                raise SystemExit(3)
            time.sleep(STEP_S)  # the work of a step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
