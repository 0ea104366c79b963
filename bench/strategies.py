"""Time, traffic and memory of each strategy, compared with plain torch.

    make bench NAME=strategies
    .venv/bin/python bench/strategies.py ddp fsdp       # these only
    .venv/bin/python bench/strategies.py fds ddp fsdp   # of these, descriptors only
    .venv/bin/python bench/strategies.py overhead session ddp fsdp   # of these, step_overhead only
    .venv/bin/python bench/strategies.py copies auto 1 2   # of these intervals, step_copies only

- `step_overhead_STRATEGY`: median step under a session over the median step of plain torch, two
  ranks on Gloo in processes of their own; each step also waits 10 ms, as for a device. The
  processes of both systems stay alive; blocks of 40 timed steps of the two alternate
  (training/turns.py). The figure is the median of the ratios over eight starts of both: the
  addresses that a process gets in memory make the steps of one start up to 7 % longer than the
  steps of another. Both systems shuffle the data.
  The model is small (2.1 MB): copies at peers and checks take a larger share of a step than with a
  real model.
- `step_overhead_session`: the same ratio for "ddp" with one rank, which has nobody to exchange
  with: the cost of `session.step()` itself.
- `step_copies_N`: median step of "fsdp" with a copy of the state at a peer every N steps, over the
  median step with a copy every 10 steps; both under a session, in alternating blocks. "auto" is the
  default: as often as copies take at most a twentieth of the time.
- `step_cpu_STRATEGY`: CPU time of one rank for a step, which other load on the machine changes
  little.
- `bytes_per_step_STRATEGY`: bytes that one of four ranks passes to collectives in a step, counted
  by the in-memory backend on real steps (of local SGD: the mean over a round of 16 steps); the
  peer's value is the prediction of `shoal.plan`.
- `bytes_per_rank_STRATEGY`: memory of parameters, gradients, optimizer state and other state of the
  strategy on one of four ranks when a step is applied; the peer's value is again the prediction.
- `fds_per_generation_STRATEGY`: open descriptors (files, sockets, pipes) that each change of
  members adds to a process that stays: the larger number of two members, over ten generations in
  which a third member joins and leaves five times.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from rows import Row, publish
from torchrun import free_port
from training.counting import counted
from training.steps import Steps
from training.turns import BlockPlan, Comparison, Ranks, compare

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline")
ONLY_COUNTED = ("hybrid", "local-sgd", "diloco")
"""Strategies without a counterpart in plain torch: their steps are counted, not timed."""
NUM_RANKS = 2
STARTS, PAIRS, SKIPPED, TIMED, PAUSE_MS = 8, 2, 5, 40, 10
SESSION = "session"
"""Name of the figures of one rank alone."""
START_S = 180.0
SCRIPT = Path(__file__).parent / "training" / "on_strategy.py"
COUNTED_FDS = (*STRATEGIES, "hsdp", "fsdp-tensor", "hybrid")
VISITS, QUIET_STEPS, FREED_S = 5, 20, 20.0
"""FREED_S: seconds within which old groups are freed, in the background, once they are idle."""


def overheads(strategies: list[str], place: Path) -> list[Row]:
    rows = []
    plan = BlockPlan(pairs=PAIRS, skipped=SKIPPED, timed=TIMED)
    config = LocalClusterConfig(directory=place / "cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        for strategy in strategies:
            alone = strategy == SESSION
            rows += overhead(cluster, strategy, plan, num_ranks=1 if alone else NUM_RANKS)
    return rows


def overhead(cluster: LocalCluster, name: str, plan: BlockPlan, *, num_ranks: int) -> list[Row]:
    """Measure the overhead over several starts of both systems."""
    found = [compared(cluster, name, plan, num_ranks, start) for start in range(STARTS)]
    pairs = [pair for each in found for pair in each.pairs]
    whole = Comparison(pairs=pairs, figure=median)
    return whole.rows(f"step_overhead_{name}", f"step_time_{name}", f"step_cpu_{name}", "torch")


def copies(intervals: Sequence[str], place: Path) -> list[Row]:
    rows: list[Row] = []
    plan = BlockPlan(pairs=PAIRS, skipped=SKIPPED, timed=TIMED)
    config = LocalClusterConfig(directory=place / "copies-cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        for every in intervals:
            found = [between_intervals(cluster, every, plan, start) for start in range(STARTS)]
            pairs = [pair for each in found for pair in each.pairs]
            whole = Comparison(pairs=pairs, figure=median)
            rows += whole.rows(
                f"step_copies_{every}",
                f"step_time_copies_{every}",
                f"step_cpu_copies_{every}",
                "10",
            )
    return rows


def between_intervals(cluster: LocalCluster, every: str, plan: BlockPlan, start: int) -> Comparison:
    """Compare fsdp with a copy every `every` steps, and every 10."""

    def ranks(interval: str) -> Ranks:
        session = session_of(cluster, f"copies-{every}-{interval}-{start}", NUM_RANKS)
        arguments = ["shoal", f"fsdp/{interval}", str(PAUSE_MS)]
        return Ranks(f"every {interval}", SCRIPT, arguments, plan, [session] * NUM_RANKS)

    with ranks(every) as ours, ranks("10") as theirs:
        return compare(ours, theirs, plan.pairs, median)


def session_of(cluster: LocalCluster, job: str, num_ranks: int) -> dict[str, str]:
    return {
        "SHOAL_COORDINATOR": cluster.coordinator,
        "SHOAL_JOB": job,
        "SHOAL_DESIRED_MEMBERS": str(num_ranks),
    }


def compared(
    cluster: LocalCluster, name: str, plan: BlockPlan, num_ranks: int, start: int
) -> Comparison:
    strategy = "ddp" if name == SESSION else name
    session = session_of(cluster, f"overhead-{name}-{start}", num_ranks)
    fixed = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [{**fixed, "RANK": str(rank)} for rank in range(num_ranks)]
    arguments = [strategy, str(PAUSE_MS)]
    with (
        Ranks("shoal", SCRIPT, ["shoal", *arguments], plan, [session] * num_ranks) as ours,
        Ranks("plain torch", SCRIPT, ["plain", *arguments], plan, ranks) as theirs,
    ):
        return compare(ours, theirs, plan.pairs, median)


def descriptors(cluster: LocalCluster, place: Path, strategy: str) -> Row:
    """Count the descriptors that two members gain while a third joins and leaves five times."""
    directory = place / f"fds-{strategy}"
    directory.mkdir()
    script = Path(__file__).parent / "training" / "on_descriptors.py"
    surroundings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SHOAL_COORDINATOR": cluster.coordinator,
        "SHOAL_JOB": f"fds-{strategy}",
        "SHOAL_DESIRED_MEMBERS": str(NUM_RANKS),
    }

    def start(*visits: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), str(directory), strategy, *visits]
        return subprocess.Popen(command, env=surroundings, stdout=subprocess.DEVNULL)

    staying, steps = [start() for _ in range(NUM_RANKS)], Steps(directory)
    try:
        await_steps(steps, NUM_RANKS)
        before, began = after_visits(start("1"), steps, staying)
        had = kinds(staying[0])
        after, ended = after_visits(start(str(VISITS)), steps, staying, wanted=before)
        print(f"fds {strategy}: the first gained {dict(kinds(staying[0]) - had)}", flush=True)
        (directory / "stop").touch()
        for process in staying:
            if process.wait(START_S):
                raise SystemExit(f"fds {strategy}: a member ended with {process.returncode}")
    finally:
        for process in staying:
            process.kill()
    more = max(now - then for now, then in zip(after, before, strict=True))
    print(f"fds {strategy}: {before} then {after}, {ended - began} generations", flush=True)
    num_generations = ended - began
    per_generation = more / num_generations
    name = f"fds_per_generation_{strategy}"
    return Row(metric=name, value=per_generation, unit="", runs=num_generations)


def kinds(process: subprocess.Popen[bytes]) -> Counter[str]:
    """Count the descriptors of a process by kind: sockets, files, ..."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        # A descriptor that is closed meanwhile is not counted.
        with suppress(FileNotFoundError):
            found[re.sub(r"[0-9a-f]{4,}|[0-9]+", "N", str(link.readlink()))] += 1
    return found


def after_visits(
    visitor: subprocess.Popen[bytes],
    steps: Steps,
    staying: list[subprocess.Popen[bytes]],
    wanted: list[int] | None = None,
) -> tuple[list[int], int]:
    """Return the number of descriptors of each staying member once the visitor has ended, and their
    generation."""
    if visitor.wait(START_S):
        raise SystemExit(f"the visitor ended with {visitor.returncode}")
    await_steps(steps, len(staying))

    def counts() -> list[int]:
        return [len(list(Path(f"/proc/{process.pid}/fd").iterdir())) for process in staying]

    def freed() -> bool:
        return wanted is not None and all(
            now <= then for now, then in zip(counts(), wanted, strict=True)
        )

    steps.await_true(freed, FREED_S)
    return counts(), max(own[-1].formation for own in steps.by_pid.values())


def await_steps(steps: Steps, world_size: int) -> None:
    if not steps.await_true(lambda: bool(steps.training(world_size, QUIET_STEPS)), START_S):
        raise SystemExit(f"no {world_size} members train")


def all_descriptors(place: Path, strategies: list[str]) -> list[Row]:
    config = LocalClusterConfig(directory=place / "fds-cluster", num_parameter_servers=0)
    with LocalCluster(config) as cluster:
        return [descriptors(cluster, place, strategy) for strategy in strategies]


def main() -> None:
    part = sys.argv[1] if sys.argv[1:2] in (["fds"], ["overhead"], ["copies"]) else ""
    chosen = sys.argv[2:] if part else sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if part == "fds":
            publish("descriptors", all_descriptors(place, chosen or list(COUNTED_FDS)))
        elif part == "overhead":
            publish("step_overhead", overheads(chosen or [SESSION, *STRATEGIES], place))
        elif part == "copies":
            publish("step_copies", copies(chosen or ["auto", "1", "2"], place))
        else:
            publish("strategies", everything(chosen or [*STRATEGIES, *ONLY_COUNTED], place))


def everything(strategies: list[str], place: Path) -> list[Row]:
    rows: list[Row] = []
    for strategy in strategies:
        rows += counted(strategy, place)
    rows += overheads([SESSION, *(s for s in strategies if s not in ONLY_COUNTED)], place)
    return rows + all_descriptors(place, [s for s in strategies if s in COUNTED_FDS])


if __name__ == "__main__":
    main()
