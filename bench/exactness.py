"""How far the result of a training with 20 kills and joins is from that of one process.

    make bench NAME=exactness
    .venv/bin/python bench/exactness.py 20 ddp fsdp    # kills, strategies

Four workers under `shoal run`, which starts whoever was killed anew: 20 kills and 20 joins a run,
each drawn at random once four train again. `elastic_exactness_STRATEGY` is the largest absolute
difference over all weights; `elastic_steps_STRATEGY` is how many steps that was.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from recovery import Stuck, await_training
from rows import Row, publish
from training.exactness import one_process
from training.jobs import NUM_WORKERS, START_S, ShoalJob, logs_in
from training.steps import Step

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

NUM_KILLS = 20
STRATEGIES = ("ddp", "fsdp")
MARGIN_STEPS = 200
END_S = 120.0


def measure(cluster: LocalCluster, directory: Path, strategy: str, num_kills: int) -> list[Row]:
    script = ("on_exactness.py", strategy)
    with ShoalJob(cluster, directory, max_members=NUM_WORKERS, script=script) as job:
        formation = -1
        for number in range(num_kills):
            formation = await_new(job, directory, formation)
            victim = random.choice(await_training(job.steps, directory))
            os.kill(victim, signal.SIGKILL)
            print(f"{strategy}: kill {number + 1} at step {newest(job).step}", flush=True)
        await_new(job, directory, formation)
        reached = max(own[-1].step for own in job.steps.by_pid.values())
        (directory / "later").write_text(str(reached + MARGIN_STEPS))
        (directory / "later").rename(directory / "stop")
        give_up_s = time.monotonic() + END_S
        while not (directory / "weights.pt").exists():
            if time.monotonic() > give_up_s:
                raise Stuck(f"no result within {END_S:g} s:\n{logs_in(directory)}")
            time.sleep(0.1)
        result = torch.load(directory / "weights.pt", weights_only=True)
    expected = one_process(result["step"])
    own = result["weights"]
    difference = max(float((own[name] - expected[name]).abs().max()) for name in expected)
    return [
        Row(metric=f"elastic_exactness_{strategy}", value=difference, unit="", runs=1),
        Row(metric=f"elastic_steps_{strategy}", value=result["step"], unit="steps", runs=1),
    ]


def newest(job: ShoalJob) -> Step:
    """The last step that anybody committed."""
    return max((own[-1] for own in job.steps.by_pid.values()), key=lambda step: step.at_s)


def await_new(job: ShoalJob, directory: Path, formation: int) -> int:
    """Wait until four train in another formation than this one; returns which."""

    def four_anew() -> bool:
        ready = job.steps.training(NUM_WORKERS, 1)
        return bool(ready) and newest(job).formation != formation

    if not job.steps.await_true(four_anew, START_S):
        raise Stuck(f"no {NUM_WORKERS} workers train again:\n{logs_in(directory)}")
    return newest(job).formation


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for strategy in sys.argv[2:] or STRATEGIES:
                rows += measure(cluster, Path(name) / strategy, strategy, num_kills)
    publish("exactness", rows)


if __name__ == "__main__":
    main()
