"""Cost of loading with `session.batches`, compared with torch's DataLoader with as many processes.

    make bench NAME=data
    .venv/bin/python bench/data.py 12    # pairs of blocks instead of the default

The two systems are one rank under "ddp" and one rank of plain DistributedDataParallel. Each has two
loading processes and the same data set of single samples, which are augmented at random; the
session also seeds each sample, as it does by default. The two are measured in alternating blocks of
60 steps (training/turns.py), and the figure is the median of the ratios. Their processes stay alive
between their blocks: batches that were loaded meanwhile are used up before the next block is timed.

- `data_overhead`: mean time of a step, session over DataLoader, where loading takes longer than the
  step: 16 samples of 2 ms each for two processes, and a pause of 4 ms as for a device. It is the
  mean because the processes deliver batches in bursts.
- `data_overhead_hidden`: the same where the step takes longer (30 ms), so that loading should cost
  no time.
- `data_step_cpu`: CPU time of the trainer itself for a step, which other work on the machine
  changes little.
"""

import sys
import tempfile
from pathlib import Path
from statistics import mean

from rows import Row, publish
from torchrun import free_port
from training.turns import BlockPlan, Ranks, compare

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

PAIRS, SKIPPED, TIMED = 12, 12, 60
"""Pairs of blocks; steps skipped, then timed, in each block. More steps are skipped than batches
are loaded ahead."""
LOADS = {"data_overhead": (2.0, 4.0), "data_overhead_hidden": (1.0, 30.0)}
"""Milliseconds to load a sample; milliseconds that each step waits."""
SCRIPT = Path(__file__).parent / "training" / "on_data.py"


def measure(cluster: LocalCluster, metric: str, plan: BlockPlan) -> list[Row]:
    session = {
        "SHOAL_COORDINATOR": cluster.coordinator,
        "SHOAL_JOB": metric,
        "SHOAL_DESIRED_MEMBERS": "1",
    }
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    load = [str(milliseconds) for milliseconds in LOADS[metric]]
    with (
        Ranks("shoal", SCRIPT, ["shoal", *load], plan, [session]) as ours,
        Ranks("plain torch", SCRIPT, ["plain", *load], plan, [alone]) as theirs,
    ):
        found = compare(ours, theirs, plan.pairs, mean)
    step, cpu = (metric.replace("overhead", figure) for figure in ("step_time", "step_cpu"))
    return found.rows(metric, step, cpu, "torch DataLoader")


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS
    plan = BlockPlan(pairs=pairs, skipped=SKIPPED, timed=TIMED)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for metric in LOADS:
                rows += measure(cluster, metric, plan)
    publish("data", rows)


if __name__ == "__main__":
    main()
