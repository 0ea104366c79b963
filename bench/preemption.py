"""Steps that a job loses if it gets a notice to end, and the time until its end.

    make bench NAME=preemption
    .venv/bin/python bench/preemption.py --times 3 ddp fsdp      # a short run of some strategies

For each strategy, a job of three workers writes a checkpoint every 1,000 steps. Its launcher gets a
SIGTERM at a random step, and is started again; this is repeated `--times` times.
`preemption_steps_lost_at_notice_STRATEGY`: committed steps, over all notices, that a later start
takes again; for `async-sgd`, batches. `preemption_end_STRATEGY`: time from the signal to the end of
the launcher, the last checkpoint included. The parameter servers of `async-sgd` keep running.
"""

import argparse
import random
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from recovery import Stuck
from rows import Row, publish, spread
from training.jobs import START_S, ShoalJob, logs_in

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

STRATEGIES = ("ddp", "zero1", "fsdp", "tensor", "async-sgd")
NUM_WORKERS = 3
MOST_STEPS = 200
"""Upper limit of the steps, drawn at random, that all workers take together before a notice."""
DRAINED = 128 + signal.SIGTERM
ENDS_WITHIN_S = 120.0


def measure(
    cluster: LocalCluster, directory: Path, strategy: str, times: int, chance: random.Random
) -> list[Row]:
    """End and restart the job of a strategy `times` times; return its figures. Raises Stuck."""
    ends_s: list[float] = []
    num_lost, before = 0, set[int]()
    with ShoalJob(
        cluster,
        directory / strategy,
        max_members=NUM_WORKERS,
        script=("on_preemption.py", strategy),
        num_workers=NUM_WORKERS,
    ) as job:
        for number in range(times + 1):
            launcher = job.launched[0] if number == 0 else job.launch(NUM_WORKERS)
            wanted = chance.randint(1, MOST_STEPS)
            if not job.steps.await_true(
                lambda wanted=wanted: len(job.steps.training(NUM_WORKERS, wanted)) > 0, START_S
            ):
                raise Stuck(f"{strategy} does not train:\n{logs_in(directory / strategy)}")
            began_s = time.monotonic()
            launcher.send_signal(signal.SIGTERM)
            if launcher.wait(ENDS_WITHIN_S) != DRAINED:
                raise Stuck(f"{strategy} does not drain:\n{logs_in(directory / strategy)}")
            job.steps.read()
            taken = {step.step for own in job.steps.by_pid.values() for step in own}
            if number > 0:
                num_lost += len(taken & before)
                ends_s.append(time.monotonic() - began_s)
            before |= taken
            for pid in list(job.steps.by_pid):
                job.steps.drop(pid)
    lost = f"preemption_steps_lost_at_notice_{strategy}"
    return [
        Row(metric=lost, value=num_lost, unit="steps", runs=times),
        *spread(f"preemption_end_{strategy}", ends_s, "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES)
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=2)
        cluster = stack.enter_context(LocalCluster(config))
        for strategy in asked.strategies:
            chance = random.Random(asked.seed)
            rows += measure(cluster, Path(name), strategy, asked.times, chance)
    publish("preemption", rows, adds=True)


if __name__ == "__main__":
    main()
