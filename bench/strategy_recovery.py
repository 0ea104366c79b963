"""Downtime of a sharded training when one of four workers is killed.

    make bench NAME=strategy_recovery
    .venv/bin/python bench/strategy_recovery.py 10 fsdp    # kills, and one strategy only

A state of 100 MB (33.6 MB of parameters and AdamW's moments), four workers under `shoal run` at
default settings on Gloo. Copies at peers are a few steps old, so some steps are trained again.

- `recovery_STRATEGY`: time from the SIGKILL to the first step of the next generation that *every*
  survivor has committed; that step itself moves much of the state over loopback.
- `step_time_STRATEGY`: time of a step with all four workers.
- `caught_up_STRATEGY`: time from the SIGKILL to a step later than any before the kill.
- `steps_redone_STRATEGY`: steps that were trained twice.

A new worker is started only once the others have caught up. It needs a core for seconds to import
torch, which would lengthen the times on a machine with few cores.

Peer of "fsdp": fully_shard under torchrun, which writes a checkpoint to disk every ten steps (the
longest interval at which Shoal copies), restarts all workers and loads it. torchft does not shard
on Gloo; its recovery with DDP is measured in bench/recovery.py.
"""

import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from recovery import Stuck, await_training, is_new, rest
from rows import Row, publish
from torchrun import free_port
from training.jobs import NUM_WORKERS, ShoalJob, logs_in, torchrun_job
from training.steps import Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

STRATEGIES = ("zero1", "zero2", "fsdp", "tensor", "pipeline")
NUM_KILLS, NUM_TORCHRUN = 6, 3
RECOVERY_S = 180.0
METRICS = (("recovery", "s"), ("caught_up", "s"), ("redone", "steps"), ("step_time", "s"))


@dataclass
class Seen:
    """Measurements of one kind of job."""

    recovery: list[float] = field(default_factory=list)
    caught_up: list[float] = field(default_factory=list)
    redone: list[float] = field(default_factory=list)
    step_time: list[float] = field(default_factory=list)


def kill(steps: Steps, directory: Path, seen: Seen) -> None:
    """Kill one worker, and wait until the others have taken a step later than any before."""
    pids = await_training(steps, directory)
    victim = random.choice(pids)
    before = steps.by_pid[victim][-1].formation
    own = [step.at_s for step in steps.by_pid[victim] if step.formation == before]
    seen.step_time.append(median(after - at for at, after in pairwise(own)))
    struck_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def again() -> float | None:
        others = rest(steps, pids, victim, struck_s)
        return steps.all_first(others, after_s=struck_s, where=is_new(before))

    if not steps.await_true(lambda: again() is not None, RECOVERY_S):
        raise Stuck(f"no step within {RECOVERY_S:g} s:\n{logs_in(directory)}")
    mine = [step for own in steps.by_pid.values() for step in own]
    reached = max(step.step for step in mine if step.formation == before)
    resumed = min(step.step for step in mine if step.at_s > struck_s and step.formation != before)

    def further() -> float | None:
        others = rest(steps, pids, victim, struck_s)
        return steps.all_first(others, after_s=struck_s, where=lambda step: step.step > reached)

    if not steps.await_true(lambda: further() is not None, RECOVERY_S):
        raise Stuck(f"no step later than before within {RECOVERY_S:g} s:\n{logs_in(directory)}")
    seen.recovery.append((again() or struck_s) - struck_s)
    seen.caught_up.append((further() or struck_s) - struck_s)
    seen.redone.append(reached - resumed + 1)
    print(
        f"{directory.name}: {seen.recovery[-1]:.3f} s, caught up {seen.caught_up[-1]:.3f} s,"
        f" {seen.redone[-1]:.0f} steps redone",
        flush=True,
    )


def measure(directory: Path, num_kills: int, strategies: list[str]) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    config = LocalClusterConfig(directory=directory / "cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        for strategy in strategies:
            place, found[strategy] = directory / strategy, Seen()
            script = ("on_large.py", strategy)
            with ShoalJob(
                cluster, place, max_members=NUM_WORKERS, script=script, restarts=False
            ) as job:
                for _ in range(num_kills):
                    kill(job.steps, place, found[strategy])
                    job.launch(1, max_restarts=0)
    return found


def measure_torchrun(directory: Path) -> Seen:
    seen = Seen()
    with torchrun_job(directory, free_port(), "on_torchrun_sharded.py") as steps:
        try:
            for _ in range(NUM_TORCHRUN):
                kill(steps, directory, seen)
        except Stuck as error:
            print(f"torchrun: {error}\nleft out after {len(seen.recovery)} runs", flush=True)
    return seen


def rows_of(found: dict[str, Seen], torchrun: Seen | None) -> list[Row]:
    rows = []
    for strategy, seen in found.items():
        peer = torchrun if strategy == "fsdp" and torchrun and torchrun.recovery else None
        for metric, unit in METRICS:
            values = getattr(seen, metric)
            name = "steps_redone" if metric == "redone" else metric
            rows.append(
                Row(
                    metric=f"{name}_{strategy}",
                    value=median(values),
                    unit=unit,
                    runs=len(values),
                    peer="torchrun-c10d" if peer else None,
                    peer_value=median(getattr(peer, metric)) if peer else None,
                )
            )
    return rows


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    strategies = sys.argv[2:] or list(STRATEGIES)
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), num_kills, strategies)
        torchrun = measure_torchrun(Path(name) / "torchrun") if "fsdp" in strategies else None
    publish("strategy_recovery", rows_of(found, torchrun))


if __name__ == "__main__":
    main()
