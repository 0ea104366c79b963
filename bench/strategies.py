"""What each strategy costs beside plain torch doing the same, what it moves and what it holds.

    make bench NAME=strategies
    .venv/bin/python bench/strategies.py ddp fsdp    # these only

- `step_overhead_STRATEGY`: median step under a session over the median step of plain torch, two
  ranks on Gloo in processes of their own; each step waits 10 ms beside its work, as for a device.
  The two are run in turns, three times each; the median of the ratios counts. For a model as
  small as this (2.1 MB) copies at peers and checks weigh more than they do for a real one.
- `step_overhead_session`: the same for one rank and "ddp": what `session.step()` itself costs.
- `bytes_per_step_STRATEGY`: what one of four ranks hands to collectives in a step, counted by the
  in-memory backend on real steps (of local SGD: the mean over a round of 16 steps); the peer's
  value is what `shoal.plan` says before.
- `bytes_per_rank_STRATEGY`: memory of parameters, gradients, optimizer state and what else a
  strategy keeps on one of four ranks when a step is applied; the peer's value again what the plan
  says.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rows import Row, publish
from torchrun import free_port
from training.counting import counted

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline")
ONLY_COUNTED = ("hybrid", "local-sgd", "diloco")
"""Plain torch has nothing to time them beside."""
NUM_RANKS = 2
TURNS, NUM_STEPS, PAUSE_MS = 3, 150, 10
START_S = 180.0
SCRIPT = Path(__file__).parent / "training" / "on_strategy.py"


def block(
    system: str, strategy: str, place: Path, environment: dict[str, str], num_ranks: int
) -> float:
    """Median seconds a step, of all ranks together."""
    result = place / f"{system}-{strategy}-{time.monotonic_ns()}"
    command = [sys.executable, str(SCRIPT), system, strategy, str(NUM_STEPS), str(PAUSE_MS)]
    started = [
        subprocess.Popen(
            [*command, str(result)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(num_ranks)
    ]
    for process in started:
        if process.wait(START_S):
            raise SystemExit(f"{system} {strategy} ended with {process.returncode}")
    gaps = [gap for path in place.glob(f"{result.name}.*") for gap in json.loads(path.read_text())]
    return median(gaps)


def overheads(strategies: list[str], place: Path) -> list[Row]:
    rows = []
    config = LocalClusterConfig(directory=place / "cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        rows += in_turns(cluster, place, "ddp", "session", num_ranks=1)
        for strategy in strategies:
            rows += in_turns(cluster, place, strategy, strategy, num_ranks=NUM_RANKS)
    return rows


def in_turns(
    cluster: LocalCluster, place: Path, strategy: str, name: str, *, num_ranks: int
) -> list[Row]:
    ratios, ours, theirs = [], [], []
    for turn in range(TURNS):
        session = {
            "SHOAL_COORDINATOR": cluster.coordinator,
            "SHOAL_JOB": f"{name}-{turn}",
            "SHOAL_DESIRED_MEMBERS": str(num_ranks),
        }
        fixed = {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        ours.append(block("shoal", strategy, place, session, num_ranks))
        theirs.append(block("plain", strategy, place, fixed, num_ranks))
        ratios.append(ours[-1] / theirs[-1])
    print(f"{name}: {median(ours) * 1e3:.2f} ms, plain {median(theirs) * 1e3:.2f} ms", flush=True)
    return [
        Row(metric=f"step_overhead_{name}", value=median(ratios), unit="", runs=TURNS),
        Row(
            metric=f"step_time_{name}",
            value=median(ours) * 1e3,
            unit="ms",
            runs=TURNS,
            peer="torch",
            peer_value=median(theirs) * 1e3,
        ),
    ]


def main() -> None:
    strategies = sys.argv[1:] or [*STRATEGIES, *ONLY_COUNTED]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for strategy in strategies:
            rows += counted(strategy, Path(name))
        rows += overheads([s for s in strategies if s not in ONLY_COUNTED], Path(name))
    publish("strategies", rows)


if __name__ == "__main__":
    main()
