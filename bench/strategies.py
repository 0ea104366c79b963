"""What each strategy costs beside plain torch doing the same, what it moves and what it holds.

    make bench NAME=strategies
    .venv/bin/python bench/strategies.py ddp fsdp       # these only
    .venv/bin/python bench/strategies.py fds ddp fsdp   # of these, descriptors only

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
- `fds_per_generation_STRATEGY`: open descriptors (files, sockets, pipes) that each change of
  members leaves in a process that stays: of two members the most, over ten generations in which a
  third one came and left five times.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

from rows import Row, publish
from torchrun import free_port
from training.counting import counted
from training.steps import Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline")
ONLY_COUNTED = ("hybrid", "local-sgd", "diloco")
"""Plain torch has nothing to time them beside."""
NUM_RANKS = 2
TURNS, NUM_STEPS, PAUSE_MS = 3, 150, 10
START_S = 180.0
SCRIPT = Path(__file__).parent / "training" / "on_strategy.py"
COUNTED_FDS = (*STRATEGIES, "hsdp", "fsdp-tensor", "hybrid")
VISITS, QUIET_STEPS, FREED_S = 5, 20, 20.0
"""Old groups are freed in the background once they are idle: within so many seconds."""


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


def descriptors(cluster: LocalCluster, place: Path, strategy: str) -> Row:
    """What two members have more of after a third one has come and left five times."""
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
        print(f"fds {strategy}: the first has more of {dict(kinds(staying[0]) - had)}", flush=True)
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
    """What the descriptors of a process are: sockets, files, ..."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        # One that is closed meanwhile is none.
        with suppress(FileNotFoundError):
            found[re.sub(r"[0-9a-f]{4,}|[0-9]+", "N", str(link.readlink()))] += 1
    return found


def after_visits(
    visitor: subprocess.Popen[bytes],
    steps: Steps,
    staying: list[subprocess.Popen[bytes]],
    wanted: list[int] | None = None,
) -> tuple[list[int], int]:
    """Descriptors of those who stay once the visitor has left for good, and their generation."""
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
    if sys.argv[1:2] == ["fds"]:
        with tempfile.TemporaryDirectory() as name:
            rows = all_descriptors(Path(name), sys.argv[2:] or list(COUNTED_FDS))
        publish("descriptors", rows)
        return
    strategies = sys.argv[1:] or [*STRATEGIES, *ONLY_COUNTED]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for strategy in strategies:
            rows += counted(strategy, Path(name))
        rows += overheads([s for s in strategies if s not in ONLY_COUNTED], Path(name))
        rows += all_descriptors(Path(name), [s for s in strategies if s in COUNTED_FDS])
    publish("strategies", rows)


if __name__ == "__main__":
    main()
