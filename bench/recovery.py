"""Downtime of four DDP workers when one is killed, halted, added or replaced.

    make bench NAME=recovery
    .venv/bin/python bench/recovery.py 50     # kills instead of the default

Real processes on one machine at default settings: a coordinator with etcd, `shoal run`, Gloo.
Each figure is the time from the signal to the first step that *every* worker of the new roster has
committed. With fewer than 100 runs, `ddp_kill_recovery_p99` is their maximum. `join_pause`: longest
time without a committed step of one of four workers around the join of a fifth, minus the usual gap
between two steps. `standby_takeover`: time from the SIGKILL to a step of the three others with the
former standby member. A killed worker is restarted at once, and imports torch meanwhile, on the
same cores.

Peers, same model and machine, in the same run:
- torchft, tuned: lighthouse heartbeat timeout 0.3 s, join timeout 0.2 s, tick 10 ms. It is not a
  dependency: `pip install -c constraints.txt -e '.[bench]'`, or name the interpreter of an
  environment that has it in SHOAL_BENCH_TORCHFT.
- torchrun, c10d: last call 1 s, a new store for every restart. Its workers start over from scratch.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from statistics import median

from rows import Row, publish
from torchrun import free_port
from training.jobs import NUM_WORKERS, START_S, ShoalJob, logs_in, torchft_job, torchrun_job
from training.steps import Step, Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

NUM_KILLS, NUM_STOPS, NUM_JOINS, NUM_TAKEOVERS = 16, 6, 6, 6
NUM_TORCHFT, NUM_TORCHRUN = 8, 3
RECOVERY_S = 120.0
STEPS_BETWEEN = 30
"""Steps that each worker of a full roster takes between two measurements."""
AROUND_JOIN_S = 1.0
TORCHFT_PYTHON = os.environ.get("SHOAL_BENCH_TORCHFT", sys.executable)
TORCHFT_MISSING = f"""torchft is not installed in {TORCHFT_PYTHON}: its rows are left out.
    .venv/bin/pip install -c constraints.txt -e '.[bench]'
or set SHOAL_BENCH_TORCHFT to the interpreter of an environment with torchft-nightly."""


class Stuck(RuntimeError):
    """Raised if workers do not train, or do not train again, within a time limit."""


def await_training(steps: Steps, directory: Path) -> list[int]:
    """Return the process ids of the workers once a full roster trains. Raises Stuck."""
    if not steps.await_true(lambda: bool(steps.training(NUM_WORKERS, STEPS_BETWEEN)), START_S):
        raise Stuck(f"no {NUM_WORKERS} workers train:\n{logs_in(directory)}")
    return steps.training(NUM_WORKERS, STEPS_BETWEEN)


def strike(steps: Steps, directory: Path, number: int) -> float:
    """Signal one worker; return the seconds until all remaining workers have committed a step
    together. Raises Stuck."""
    pids = await_training(steps, directory)
    victim = random.choice(pids)
    before = steps.by_pid[victim][-1].formation
    struck_s = time.monotonic()
    os.kill(victim, number)

    def again() -> float | None:
        return steps.all_first(
            rest(steps, pids, victim, struck_s), after_s=struck_s, where=is_new(before)
        )

    recovered = steps.await_true(lambda: again() is not None, RECOVERY_S)
    if number == signal.SIGSTOP:
        os.kill(victim, signal.SIGKILL)
    if not recovered:
        raise Stuck(f"no step within {RECOVERY_S:g} s:\n{logs_in(directory)}")
    return (again() or struck_s) - struck_s


def rest(steps: Steps, pids: Sequence[int], victim: int, struck_s: float) -> list[int]:
    """Return the processes that have to commit a step: all others, or the new ones if the old ones
    are gone."""
    others = [pid for pid in pids if pid != victim]
    fresh = [pid for pid, own in steps.by_pid.items() if own[0].at_s > struck_s]
    if any(is_running(pid) for pid in others):
        return others
    return fresh if len(fresh) >= len(others) else others


def is_new(formation: int) -> Callable[[Step], bool]:
    return lambda step: step.formation != formation


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def strikes(steps: Steps, directory: Path, number: int, num_runs: int) -> list[float]:
    name = signal.Signals(number).name
    seen = []
    for _ in range(num_runs):
        seen.append(strike(steps, directory, number))
        print(f"{directory.name}: {name} {seen[-1]:.3f} s", flush=True)
    return seen


def join_pauses(cluster: LocalCluster, directory: Path, num_runs: int) -> list[float]:
    """Seconds of each `join_pause`: a fifth worker joins four, and is then killed."""
    seen: list[float] = []
    with ShoalJob(cluster, directory, max_members=NUM_WORKERS + 1) as job:
        while len(seen) < num_runs:
            pids = await_training(job.steps, directory)
            launcher = job.launch(1, max_restarts=0)
            if not job.steps.await_true(
                lambda: bool(job.steps.training(NUM_WORKERS + 1, STEPS_BETWEEN)), START_S
            ):
                raise Stuck(f"the fifth did not join:\n{logs_in(directory)}")
            (fifth,) = set(job.steps.training(NUM_WORKERS + 1, STEPS_BETWEEN)) - set(pids)
            joined_s = job.steps.by_pid[fifth][0].at_s
            # Wait for the steps after the join, whose gaps count too.
            job.steps.await_step(pids, after_s=joined_s + AROUND_JOIN_S, within_s=START_S)
            seen.append(job.steps.pause(pids, joined_s, AROUND_JOIN_S))
            print(f"{directory.name}: {seen[-1]:.3f} s", flush=True)
            os.kill(fifth, signal.SIGKILL)
            launcher.wait(START_S)
    return seen


def takeovers(cluster: LocalCluster, directory: Path, num_runs: int) -> list[float]:
    """Seconds of each `standby_takeover`: one of four workers is killed, a standby replaces it."""
    seen: list[float] = []
    with ShoalJob(cluster, directory, max_members=NUM_WORKERS) as job:
        await_training(job.steps, directory)
        job.launch(1)
        while len(seen) < num_runs:
            pids = await_training(job.steps, directory)
            if not job.steps.await_true(lambda: job.num_standbys() == 1, START_S):
                raise Stuck(f"no member is on standby:\n{logs_in(directory)}")
            seen.append(takeover(job, directory, pids))
            print(f"{directory.name}: {seen[-1]:.3f} s", flush=True)
    return seen


def takeover(job: ShoalJob, directory: Path, pids: Sequence[int]) -> float:
    victim = random.choice(pids)
    before = job.steps.by_pid[victim][-1].formation
    struck_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def full(step: Step) -> bool:
        return step.formation != before and step.world_size == NUM_WORKERS

    def four() -> list[float]:
        first = (job.steps.first(pid, after_s=struck_s, where=full) for pid in job.steps.by_pid)
        return sorted(at_s for at_s in first if at_s is not None)

    if not job.steps.await_true(lambda: len(four()) >= NUM_WORKERS, RECOVERY_S):
        raise Stuck(f"no step of four within {RECOVERY_S:g} s:\n{logs_in(directory)}")
    return four()[NUM_WORKERS - 1] - struck_s


def has_torchft(*others: str) -> bool:
    """True if the interpreter TORCHFT_PYTHON can import torchft and the other modules."""
    command = [TORCHFT_PYTHON, "-c", f"import {', '.join(('torchft', *others))}"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # the variable names no program
        return False


def measure_shoal(directory: Path, num_kills: int) -> dict[str, list[float]]:
    config = LocalClusterConfig(directory=directory / "cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        place = directory / "shoal"
        with ShoalJob(cluster, place, max_members=NUM_WORKERS) as job:
            kills = strikes(job.steps, place, signal.SIGKILL, num_kills)
            stops = strikes(job.steps, place, signal.SIGSTOP, NUM_STOPS)
        joins = join_pauses(cluster, directory / "join", NUM_JOINS)
        standby = takeovers(cluster, directory / "standby", NUM_TAKEOVERS)
    return {"kill": kills, "stop": stops, "join": joins, "standby": standby}


def measure_peers(directory: Path) -> dict[str, list[float]]:
    seen = {}
    if has_torchft():
        place = directory / "torchft"
        with torchft_job(TORCHFT_PYTHON, place) as steps:
            seen["torchft-nightly"] = peer_kills(steps, place, NUM_TORCHFT)
    place = directory / "torchrun"
    with torchrun_job(place, free_port()) as steps:
        seen["torchrun-c10d"] = peer_kills(steps, place, NUM_TORCHRUN)
    return {peer: values for peer, values in seen.items() if values}


def peer_kills(steps: Steps, directory: Path, num_runs: int) -> list[float]:
    """Kill as `strikes` does. If the peer does not recover from a kill, leave this run out and
    stop."""
    seen: list[float] = []
    try:
        for _ in range(num_runs):
            seen += strikes(steps, directory, signal.SIGKILL, 1)
    except Stuck as error:
        print(f"{directory.name}: {error}\nleft out after {len(seen)} runs", flush=True)
    return seen


def percentile_99(values: Sequence[float]) -> float:
    """The 99th percentile; the largest value if there are fewer than 100."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]


def rows_of(own: dict[str, list[float]], peers: dict[str, list[float]]) -> list[Row]:
    def row(metric: str, values: Sequence[float], peer: str | None = None) -> Row:
        of = percentile_99 if metric.endswith("_p99") else median
        peer_value = of(peers[peer]) if peer is not None else None
        return Row(
            metric=metric,
            value=of(values),
            unit="s",
            runs=len(values),
            peer=peer,
            peer_value=peer_value,
        )

    rows = []
    for metric in ("ddp_kill_recovery", "ddp_kill_recovery_p99"):
        rows += [row(metric, own["kill"], peer) for peer in peers or (None,)]
    return [
        *rows,
        row("ddp_stop_recovery", own["stop"]),
        row("join_pause", own["join"]),
        row("standby_takeover", own["standby"]),
    ]


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    with tempfile.TemporaryDirectory() as name:
        own = measure_shoal(Path(name), num_kills)
        peers = measure_peers(Path(name))
    publish("recovery", rows_of(own, peers))
    if "torchft-nightly" not in peers:
        print(TORCHFT_MISSING)


if __name__ == "__main__":
    main()
