"""Cost of a straggler: one worker that is five times slower than three others.

    make bench NAME=stragglers
    .venv/bin/python bench/stragglers.py 1      # runs of each kind instead of the default

Real processes on one machine: etcd, a coordinator, two parameter servers, workers. Each step waits
for 50 ms, as for a device, and for 250 ms in the slow worker. `straggler_efficiency_{mode}` is
together / (3 fast + slow), in steps per second of three jobs of this mode: all four workers
together, a fast worker alone, the slow worker alone. `ssp` has a bound of 8 rounds, above the ratio
of 5 between the speeds; `ssp_bound_2` has a bound below this ratio; in `bsp` all workers take each
round together.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rows import Row, publish
from training.steps import Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import ChildCommand, Supervisor

MODES = {"async": ("async", 0), "ssp": ("ssp", 8), "ssp_bound_2": ("ssp", 2), "bsp": ("bsp", 0)}
FAST_MS, SLOW_MS = 50, 250
WINDOW_S = 10.0
STEPS_BEFORE = 10
START_S = 120.0
NUM_RUNS = 3
SCRIPT = Path(__file__).parent / "training" / "on_straggler.py"


@contextmanager
def job(
    cluster: LocalCluster, directory: Path, mode: str, pauses_ms: Sequence[int]
) -> Iterator[Path]:
    """Workers with these pauses, training until the end of the block."""
    directory.mkdir()
    kind, bound = MODES[mode]
    with Supervisor(grace_s=1.0) as supervisor:
        for number, pause_ms in enumerate(pauses_ms):
            arguments = (str(directory), kind, str(bound), str(pause_ms), str(len(pauses_ms)))
            supervisor.spawn(
                ChildCommand(
                    name=f"worker-{number}",
                    arguments=(sys.executable, str(SCRIPT), *arguments),
                    environment={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "SHOAL_JOB": f"{directory.parent.name}-{directory.name}",
                        "SHOAL_COORDINATOR": cluster.coordinator,
                    },
                    log_path=directory / f"worker-{number}.log",
                )
            )
        yield directory


def steps_per_s(
    cluster: LocalCluster, directory: Path, mode: str, pauses_ms: Sequence[int]
) -> float:
    """Measure steps per second of all workers together, once each of them has taken some."""
    with job(cluster, directory, mode, pauses_ms):
        steps = Steps(directory)

        def all_step() -> bool:
            counts = [len(own) for own in steps.by_pid.values()]
            return len(counts) == len(pauses_ms) and min(counts) >= STEPS_BEFORE

        if not steps.await_true(all_step, START_S):
            raise SystemExit(f"{directory}: not all workers train; see their logs there")
        begun_s = time.monotonic()
        time.sleep(WINDOW_S)
        steps.read()
        times = [step.at_s for own in steps.by_pid.values() for step in own]
        return sum(begun_s <= at_s < begun_s + WINDOW_S for at_s in times) / WINDOW_S


def efficiency(cluster: LocalCluster, directory: Path, mode: str) -> float:
    fast = steps_per_s(cluster, directory / "fast", mode, [FAST_MS])
    slow = steps_per_s(cluster, directory / "slow", mode, [SLOW_MS])
    all_of_them = steps_per_s(cluster, directory / "all", mode, [FAST_MS] * 3 + [SLOW_MS])
    together = all_of_them / (3 * fast + slow)
    print(
        f"{mode}: {fast:.1f} and {slow:.1f} steps/s alone, {all_of_them:.1f} together:"
        f" {together:.3f}",
        flush=True,
    )
    return together


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_RUNS
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        config = LocalClusterConfig(directory=Path(name) / "cluster", num_parameter_servers=2)
        with LocalCluster(config) as cluster:
            for run in range(num_runs):
                for mode, values in found.items():
                    directory = Path(name) / f"{mode}-{run}"
                    directory.mkdir()
                    values.append(efficiency(cluster, directory, mode))
    publish(
        "stragglers",
        [
            Row(
                metric=f"straggler_efficiency_{mode}",
                value=median(values),
                unit="of the sum of single speeds",
                runs=num_runs,
            )
            for mode, values in found.items()
        ],
    )


if __name__ == "__main__":
    main()
