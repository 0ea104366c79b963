"""How well models do that members train at their own pace, beside one process.

    make bench NAME=accuracy
    .venv/bin/python bench/accuracy.py digits 1      # one task, so many seeds

Real processes on one machine: etcd, a coordinator, two parameter servers, 1, 4 or 8 workers, which
share out the same samples with the same batch and learning rate as the one process. See
training/accuracy_tasks.py for the tasks. `accuracy_{task}_{mode}_{workers}`: percent of the held-
out samples that are told right after the last of all updates, the mean over the seeds; the peer is
one process of plain torch. Modes: `async`; `ssp` with a bound of 8 rounds; `dc_asgd`, which
compensates for delay (of the parameters; rows of embeddings are seldom stale).
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rows import Row, publish

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import Command, Supervisor

ALL_TASKS = ("digits", "clicks")
MODES = ("async", "ssp", "dc_asgd")
NUM_WORKERS = (1, 4, 8)
NUM_SEEDS = 3
TRAINING_S = 600.0
SCRIPT = Path(__file__).parent / "training" / "on_accuracy.py"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of `num_workers` workers; of the one process where the mode is `alone`."""

    task: str
    mode: str
    num_workers: int
    seed: int

    @property
    def job(self) -> str:
        return f"{self.task}-{self.mode}-{self.num_workers}-{self.seed}"


def train(training: Training, coordinator: str, result: Path) -> float:
    """Percent right at the last worker to end: what it evaluates has every update."""
    job = training.job
    with Supervisor(grace_s=1.0) as supervisor:
        workers = [
            supervisor.spawn(
                Command(
                    name=f"worker-{number}",
                    arguments=(
                        *(sys.executable, str(SCRIPT), training.task, training.mode),
                        *(str(training.num_workers), str(training.seed), str(result / job)),
                    ),
                    environment={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "SHOAL_JOB": job,
                        "SHOAL_COORDINATOR": coordinator,
                    },
                    log_path=result / f"{job}-{number}.log",
                )
            )
            for number in range(training.num_workers)
        ]
        for number, worker in enumerate(workers):
            if worker.wait(TRAINING_S) != 0:
                log = (result / f"{job}-{number}.log").read_text()[-2000:]
                raise SystemExit(f"{job}: worker {number} ended with {worker.exit_code}\n{log}")
    ends = [json.loads(path.read_text()) for path in result.glob(f"{job}.*")]
    percent = float(max(ends, key=lambda end: end["at_s"])["accuracy"])
    print(f"{job}: {percent:.2f} %", flush=True)
    return percent


def main() -> None:
    tasks = sys.argv[1:2] or ALL_TASKS
    seeds = range(int(sys.argv[2]) if len(sys.argv) > 2 else NUM_SEEDS)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=2)
        with LocalCluster(config) as cluster:

            def percent(task: str, mode: str, num_workers: int) -> float:
                return mean(
                    train(
                        Training(task=task, mode=mode, num_workers=num_workers, seed=seed),
                        cluster.coordinator,
                        Path(name),
                    )
                    for seed in seeds
                )

            for task in tasks:
                alone = percent(task, "alone", 1)
                rows += [
                    Row(
                        metric=f"accuracy_{task}_{mode}_{number}",
                        value=percent(task, mode, number),
                        unit="%",
                        runs=len(seeds),
                        peer="one process",
                        peer_value=alone,
                    )
                    for mode in MODES
                    for number in NUM_WORKERS
                ]
    publish("accuracy", rows)


if __name__ == "__main__":
    main()
