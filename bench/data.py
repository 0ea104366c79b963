"""What loading by `session.batches` costs beside torch's own DataLoader with as many processes.

    make bench NAME=data
    .venv/bin/python bench/data.py 5    # turns instead of the default

One rank under "ddp" and one of plain DistributedDataParallel, two processes that load for each, the
same data set of single samples that are changed at random; the session also seeds each sample, as
it does by default. By turns, in one run; the median of the ratios counts.

- `data_overhead`: mean seconds a step, session over DataLoader, where loading takes longer than
  the step: 16 samples of 2 ms each for two processes, beside a wait of 4 ms as for a device. The
  mean, as each process brings batches in bursts.
- `data_overhead_hidden`: the same where the step takes longer (30 ms), so that loading should not
  be seen at all.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from rows import Row, publish
from torchrun import free_port

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

TURNS = 3
LOADS = {"data_overhead": (2.0, 4.0), "data_overhead_hidden": (1.0, 30.0)}
"""Milliseconds that a sample takes, and that each step waits."""
START_S = 180.0
SCRIPT = Path(__file__).parent / "training" / "on_data.py"


def seconds_a_step(
    system: str, load: tuple[float, float], result: Path, environment: dict[str, str]
) -> float:
    command = [sys.executable, str(SCRIPT), system, *map(str, load), str(result)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    ended = subprocess.run(
        command, env=surroundings, stdout=subprocess.DEVNULL, timeout=START_S, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{system} ended with {ended.returncode}")
    return mean(json.loads(result.read_text()))


def in_turns(cluster: LocalCluster, place: Path, metric: str, num_turns: int) -> list[Row]:
    ours, theirs = [], []
    for turn in range(num_turns):
        session = {
            "SHOAL_COORDINATOR": cluster.coordinator,
            "SHOAL_JOB": f"{metric}-{turn}",
            "SHOAL_DESIRED_MEMBERS": "1",
        }
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        load = LOADS[metric]
        ours.append(seconds_a_step("shoal", load, place / f"{metric}-shoal-{turn}", session))
        theirs.append(seconds_a_step("plain", load, place / f"{metric}-plain-{turn}", alone))
        print(f"{metric}: {ours[-1] * 1e3:.2f} ms, plain {theirs[-1] * 1e3:.2f} ms", flush=True)
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    return [
        Row(metric=metric, value=median(ratios), unit="", runs=num_turns),
        Row(
            metric=metric.replace("overhead", "step_time"),
            value=median(ours) * 1e3,
            unit="ms",
            runs=num_turns,
            peer="torch DataLoader",
            peer_value=median(theirs) * 1e3,
        ),
    ]


def main() -> None:
    num_turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for metric in LOADS:
                rows += in_turns(cluster, Path(name), metric, num_turns)
    publish("data", rows)


if __name__ == "__main__":
    main()
