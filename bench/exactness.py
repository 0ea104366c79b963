"""Exactness of a training with 20 faults, compared with one process.

    make bench NAME=exactness
    .venv/bin/python bench/exactness.py 20 ddp fsdp    # faults, strategies

Three to five workers under `shoal run`, which restarts killed and fenced workers, train a model
whose output layer shares the embedding's weight, with a schedule of learning rates. Each fault is
drawn once all workers train again: a kill, a halt (SIGSTOP of a worker until the others continue
without it), a drain, or a join. `elastic_exactness_STRATEGY`: largest absolute difference over all
weights.
`elastic_steps_STRATEGY`: number of steps. `elastic_faults_STRATEGY`: number of faults.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from recovery import Stuck
from rows import Row, publish
from torch import Tensor
from training.exactness import one_process
from training.jobs import NUM_WORKERS, START_S, ShoalJob, logs_in
from training.steps import Step, Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

NUM_FAULTS = 20
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid", "hsdp")
FEWEST, MOST = 3, 5
MARGIN_STEPS = 200
END_S = 120.0
SEED = 20


class FaultyRun:
    """A job, and the faults injected into it."""

    def __init__(self, job: ShoalJob, directory: Path, drawn: random.Random) -> None:
        self._job = job
        self._directory = directory
        self._random = drawn
        self._size = NUM_WORKERS
        self._formation = -1

    def strike(self) -> str:
        """Inject one fault, and wait until the job trains with the expected number of workers."""
        self.await_whole()
        possible: list[Callable[[], None]] = [self._kill, self._kill, self._halt]
        possible += [self._drain] if self._size > FEWEST else []
        possible += [self._join] if self._size < MOST else []
        chosen = self._random.choice(possible)
        chosen()
        self.await_whole()
        return chosen.__name__.removeprefix("_")

    def await_whole(self) -> None:
        """Wait until the expected number of workers train together."""
        if not self._job.steps.await_true(
            lambda: bool(self._job.steps.training(self._size, 1)), START_S
        ):
            raise Stuck(f"no {self._size} workers train:\n{logs_in(self._directory)}")
        self._formation = newest(self._job).formation

    def _victim(self) -> int:
        return self._random.choice(self._job.steps.training(self._size, 1))

    def _kill(self) -> None:
        os.kill(self._victim(), signal.SIGKILL)
        self._await_left()

    def _halt(self) -> None:
        victim = self._victim()
        os.kill(victim, signal.SIGSTOP)
        self._await_left()
        os.kill(victim, signal.SIGCONT)

    def _drain(self) -> None:
        os.kill(self._victim(), signal.SIGTERM)
        self._size -= 1
        self._await_left()

    def _join(self) -> None:
        self._job.launch(1)
        self._size += 1
        self._await_left()

    def _await_left(self) -> None:
        """Wait until another set of workers than before the fault has committed a step."""

        def left() -> bool:
            return newest(self._job).formation != self._formation

        if not self._job.steps.await_true(left, START_S):
            raise Stuck(f"the generation has not changed:\n{logs_in(self._directory)}")


def measure(cluster: LocalCluster, directory: Path, strategy: str, num_faults: int) -> list[Row]:
    script = ("on_exactness.py", strategy)
    drawn = random.Random(f"{SEED} {strategy}")
    with ShoalJob(cluster, directory, max_members=MOST, script=script) as job:
        run = FaultyRun(job, directory, drawn)
        for number in range(num_faults):
            done = run.strike()
            print(f"{strategy}: {number + 1}: {done} by step {newest(job).step}", flush=True)
        run.await_whole()
        num_steps, difference = end(job.steps, directory)
    return [
        Row(metric=f"elastic_exactness_{strategy}", value=difference, unit="", runs=1),
        Row(metric=f"elastic_steps_{strategy}", value=num_steps, unit="steps", runs=1),
        Row(metric=f"elastic_faults_{strategy}", value=num_faults, unit="faults", runs=1),
    ]


def end(steps: Steps, directory: Path) -> tuple[int, float]:
    """Let all workers stop; return the number of steps, and the largest difference between their
    weights and the weights of one process. Raises Stuck."""
    num_steps, weights = result(steps, directory)
    return num_steps, difference(weights, one_process(num_steps))


def result(steps: Steps, directory: Path) -> tuple[int, dict[str, Tensor]]:
    """Let all workers stop MARGIN_STEPS after the newest step; return the number of steps, and the
    weights. Raises Stuck."""
    reached = max(own[-1].step for own in steps.by_pid.values())
    (directory / "later").write_text(str(reached + MARGIN_STEPS))
    (directory / "later").rename(directory / "stop")
    give_up_s = time.monotonic() + END_S
    while not (directory / "weights.pt").exists():
        if time.monotonic() > give_up_s:
            raise Stuck(f"no result within {END_S:g} s:\n{logs_in(directory)}")
        time.sleep(0.1)
    found = torch.load(directory / "weights.pt", weights_only=True)
    return found["step"], found["weights"]


def difference(own: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest absolute difference over all weights; NaN if one of them is."""
    # `max` of Python skips a NaN that is not the first value.
    return float(torch.stack([(own[name] - expected[name]).abs().max() for name in expected]).max())


def newest(job: ShoalJob) -> Step:
    """The last step that any worker committed."""
    return max((own[-1] for own in job.steps.by_pid.values()), key=lambda step: step.at_s)


def main() -> None:
    num_faults = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_FAULTS
    # With two threads on a busy machine, each small operation would wait until both are scheduled,
    # and the training of one process would take minutes.
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=0)
        with LocalCluster(config) as cluster:
            for strategy in sys.argv[2:] or STRATEGIES:
                rows += measure(cluster, Path(name) / strategy, strategy, num_faults)
    publish("exactness", rows)


if __name__ == "__main__":
    main()
