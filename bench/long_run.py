"""Long runs by published protocols, of Shoal beside torchrun and torchft.

    .venv/bin/python bench/long_run.py steps --record
    .venv/bin/python bench/long_run.py kills --kills 2000 --systems shoal-ddp,torchft --record

`steps` is Clockwork's protocol by steps: 3,000 steps on four machines; every 330 to 555 steps,
drawn by `--seed`, a machine is killed (SIGKILL) and a new one starts at once; systems that continue
from checkpoints write one every 100 steps. `seconds`: time until the last step. `seconds_without`:
the same time of a run without kills. `relative`: the ratio of the two. `stalled_s` and
`stalled_without_s`: how much of each of the two times was lost in long gaps between useful steps,
those of more than two median steps; one median step of each such gap does not count. The clock
starts when all machines train. `distance`: largest difference of a weight from one process.

`kills` is torchft's protocol: `--kills` workers with tiny models are killed one after the other,
without any checkpoint. A kill follows once at least three of four workers train; the launcher of
the killed worker restarts it. One worker is never killed. The pause of a step is longer, since
starts need the same cores. `distance` is as above. After each twentieth of the kills, once all four
workers train, the bench samples the files and bytes in /dev/shm, and the memory, threads and open
files of each process that lives throughout: coordinator or lighthouse, etcd, the launcher of a
killed worker, the launcher of the worker that is never killed, and this worker itself.
`growth_per_kill`: growth from the sample after a tenth of the kills to the last one, per kill.

Model, pause of each step in `steps`, and systems are as in bench/trace.py. Of a system that did not
get to the end, the reason is recorded (`failed`).
"""

import argparse
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from exactness import difference, result
from recovery import TORCHFT_MISSING, Stuck, has_torchft
from rows import first_line, print_entries, record
from training.changes import positive, positive_number
from training.effective import effective
from training.exactness import checkpoint_and_step_s, one_process_at
from training.jobs import NUM_WORKERS
from training.machines import (
    ONE_PROCESS,
    START_S,
    SYSTEMS,
    Machines,
    NotTraining,
    Plan,
    Running,
    descendants,
    end_on_sigterm,
    kill,
)
from training.usage import Usage, growth_per_kill, shared_memory, usage_of

PAUSE_S, KILLS_PAUSE_S = 0.03, 0.25
NUM_STEPS, CHECKPOINT_EVERY = 3000, 100
BETWEEN_KILLS = (330, 555)
NUM_KILLS, NUM_SAMPLES = 2000, 20
STEPS_BEFORE = 30
TRAINING_AT_LEAST = 3
STEP_WITHIN_S = 300.0
SURVIVOR = "machine-0"


def kill_steps(seed: int, num_steps: int) -> list[int]:
    """Steps at which a machine is killed."""
    drawn = random.Random(seed)
    steps = accumulate(drawn.randint(*BETWEEN_KILLS) for _ in range(num_steps))
    return [step for step in steps if step < num_steps]


def run_steps(
    system: str, plan: Plan, kills: Sequence[int], asked: argparse.Namespace
) -> tuple[dict[str, Any], int, Any]:
    """Return the figures of a run of `asked.steps` steps, and its last step and weights. Raises
    NotTraining or Stuck."""
    plan.directory.mkdir()
    drawn = random.Random(asked.seed)
    first = 1 if system == ONE_PROCESS else NUM_WORKERS
    with SYSTEMS[system](plan) as running, Machines(plan, running) as machines:
        for number in range(first):
            machines.join(f"machine-{number}")
        machines.await_training(first, STEPS_BEFORE, START_S)
        start_s, begun = time.monotonic(), reached(machines)
        for number, step in enumerate(kills):
            await_step(machines, begun + step)
            victim = drawn.choice(machines.names)
            machines.lose(victim)
            machines.join(f"machine-{first + number}")
            print(f"{system}: {victim} lost after {step} steps", flush=True)
        await_step(machines, begun + asked.steps)
        end_s = time.monotonic()
        steps = [step for own in machines.steps.by_pid.values() for step in own]
        figures = {**asdict(effective(steps, start_s, end_s)), "kills": len(kills)}
        print(f"{system}: {figures}", flush=True)
        end = result(machines.steps, plan.directory)
    return figures, *end


def reached(machines: Machines) -> int:
    newest = machines.steps.newest()
    return newest.step if newest is not None else 0


def await_step(machines: Machines, step: int) -> None:
    """Return once the training has reached the step. Raises NotTraining."""
    if not machines.steps.await_true(lambda: reached(machines) >= step, STEP_WITHIN_S):
        raise NotTraining(f"not at step {step} within {STEP_WITHIN_S:g} s")


def measure_steps(asked: argparse.Namespace, systems: Sequence[str]) -> list[dict[str, Any]]:
    kills = kill_steps(asked.seed, asked.steps)
    cost_s, _ = checkpoint_and_step_s()
    found: list[tuple[dict[str, Any], int, Any]] = []
    failed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for system in systems:
            try:
                without = run_steps(system, plan_of(Path(name) / f"{system}-whole"), [], asked)
                figures, *end = (
                    without
                    if system == ONE_PROCESS
                    else run_steps(system, plan_of(Path(name) / system), kills, asked)
                )
            except (NotTraining, Stuck) as error:
                print(f"{system} did not end: {error}", flush=True)
                run = {"system": system, "seed": asked.seed, "steps": asked.steps}
                failed.append({**run, "failed": first_line(error)})
                continue
            whole = without[0]
            entry = {
                "system": system,
                "seed": asked.seed,
                "steps": asked.steps,
                "seconds": figures["wall_s"],
                "seconds_without": whole["wall_s"],
                "relative": figures["wall_s"] / whole["wall_s"],
                "stalled_s": figures["stalled_s"],
                "stalled_without_s": whole["stalled_s"],
                "checkpoint_s": cost_s if system == "torchrun" else None,
                **{key: figures[key] for key in ("kills", "steps_twice", "steps_lost", "step_s")},
            }
            found.append((entry, *end))
    return [*with_distances(found), *failed]


def with_distances(found: Sequence[tuple[dict[str, Any], int, Any]]) -> list[dict[str, Any]]:
    """Return the entries, each with the largest difference of its weights from one process."""
    expected = one_process_at(num_steps for _, num_steps, _ in found)
    return [
        {**entry, "distance": difference(weights, expected[num_steps])}
        for entry, num_steps, weights in found
    ]


def plan_of(directory: Path, pause_s: float = PAUSE_S) -> Plan:
    return Plan(
        directory=directory,
        pause_s=pause_s,
        max_machines=NUM_WORKERS,
        checkpoint_every=CHECKPOINT_EVERY,
        max_restarts=1_000_000,
    )


class KilledRun:
    """A run whose workers are killed again and again, except one."""

    def __init__(self, machines: Machines, running: Running, drawn: random.Random) -> None:
        self._machines, self._running, self._random = machines, running, drawn
        self._survivor = family(machines, SURVIVOR)[-1]
        self.samples: list[Mapping[str, Usage]] = []
        self.shared: list[tuple[int, int]] = []
        """Number of files and bytes in /dev/shm at each sample."""

    def kill_one(self) -> None:
        """Kill a worker once enough train, but not the survivor."""
        pids: list[int] = []

        def enough() -> bool:
            pids[:] = self._training()
            return bool(pids)

        if not self._machines.steps.await_true(enough, STEP_WITHIN_S):
            raise NotTraining(f"fewer than {TRAINING_AT_LEAST} workers train")
        victim = self._random.choice([pid for pid in pids if pid != self._survivor])
        kill([victim])
        # The victim's steps are no longer needed; without its file, each read stays short.
        self._machines.steps.drop(victim)

    def _training(self) -> list[int]:
        steps = self._machines.steps
        sizes = range(TRAINING_AT_LEAST, NUM_WORKERS + 1)
        return next((pids for size in sizes if (pids := steps.training(size, 1))), [])

    def sample(self) -> None:
        """Sample the usage of the processes that stay, once all workers train. Raises NotTraining
        if the survivor is another process than at the start."""
        self._machines.await_training(NUM_WORKERS, STEPS_BEFORE, STEP_WITHIN_S)
        own = family(self._machines, SURVIVOR)
        if own[-1] != self._survivor:
            raise NotTraining("the worker that is never killed was restarted")
        pids = {**self._running.services, "survivor": own[-1]}
        if len(own) > 1:
            other = family(self._machines, "machine-1")
            pids |= {"survivor's launcher": own[0], "launcher": other[0]}
        self.samples.append({name: usage_of(pid) for name, pid in pids.items()})
        self.shared.append(shared_memory())
        print(f"{self.samples[-1]} /dev/shm {self.shared[-1]}", flush=True)


def family(machines: Machines, name: str) -> list[int]:
    """Process ids of a machine's launcher, if it has one, and of its worker."""
    pid = machines.pid(name)
    return [pid, *descendants(pid)[:1]]


def run_kills(
    system: str, plan: Plan, asked: argparse.Namespace
) -> tuple[dict[str, Any], int, Any]:
    """Return the figures of a run with `asked.kills` kills, or as many as `asked.minutes` allow,
    and its last step and weights. Raises NotTraining or Stuck."""
    plan.directory.mkdir()
    every = max(1, asked.kills // NUM_SAMPLES)
    with SYSTEMS[system](plan) as running, Machines(plan, running) as machines:
        for number in range(NUM_WORKERS):
            machines.join(f"machine-{number}")
        machines.await_training(NUM_WORKERS, STEPS_BEFORE, START_S)
        run = KilledRun(machines, running, random.Random(asked.seed))
        began_s = time.monotonic()
        run.sample()
        num_kills = 0
        while num_kills < asked.kills and time.monotonic() - began_s < 60 * asked.minutes:
            for _ in range(every):
                run.kill_one()
            num_kills += every
            print(f"{system}: {num_kills} kills, step {reached(machines)}", flush=True)
            run.sample()
        seconds = time.monotonic() - began_s
        end = result(machines.steps, plan.directory)
    figures = {
        "kills": num_kills,
        "seconds": seconds,
        "kills_per_minute": 60 * num_kills / seconds,
        "samples": [{name: asdict(each) for name, each in own.items()} for own in run.samples],
        "growth_per_kill": growth_per_kill(run.samples, every),
        "shm_files": [files for files, _ in run.shared],
        "shm_bytes": [size for _, size in run.shared],
    }
    return figures, *end


def measure_kills(asked: argparse.Namespace, systems: Sequence[str]) -> list[dict[str, Any]]:
    found: list[tuple[dict[str, Any], int, Any]] = []
    failed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for system in systems:
            plan = plan_of(Path(name) / system, KILLS_PAUSE_S)
            try:
                figures, *end = run_kills(system, plan, asked)
            except (NotTraining, Stuck) as error:
                print(f"{system} did not end: {error}", flush=True)
                run = {"system": system, "seed": asked.seed}
                failed.append({**run, "failed": first_line(error)})
                continue
            entry = {"system": system, "seed": asked.seed, "steps": end[0]}
            found.append(({**entry, **figures}, *end))
    return [*with_distances(found), *failed]


STEPS_COLUMNS = (
    "system",
    "seconds",
    "seconds_without",
    "relative",
    "kills",
    "steps_twice",
    "steps_lost",
    "distance",
)
KILLS_COLUMNS = ("system", "kills", "kills_per_minute", "steps", "distance")
KEYS = {"steps": ("system", "seed", "steps"), "kills": ("system", "seed")}
"""Keys of an entry, by protocol. `--minutes` may end a run after any number of kills."""
OF_KILLS = ("shoal-ddp", "shoal-fsdp", "torchft")
"""Systems whose survivors continue without a checkpoint."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("protocol", choices=("steps", "kills"))
    parser.add_argument(
        "--systems",
        help=f"names with commas between them (all by default): {', '.join(SYSTEMS)};"
        f" for kills: {', '.join(OF_KILLS)}",
    )
    parser.add_argument(
        "--steps",
        type=positive_number,
        default=NUM_STEPS,
        help=f"steps: length of the run ({NUM_STEPS}); the first kill comes after"
        f" {BETWEEN_KILLS[0]} to {BETWEEN_KILLS[1]} steps, so a shorter run has none",
    )
    parser.add_argument(
        "--kills",
        type=positive_number,
        default=NUM_KILLS,
        help=f"kills: number of kills ({NUM_KILLS})",
    )
    parser.add_argument(
        "--minutes",
        type=positive,
        default=math.inf,
        help="kills: begin no further kills after this time, without the start of the machines",
    )
    parser.add_argument("--seed", type=int, default=1, help="draws when and which machine is lost")
    parser.add_argument(
        "--record", action="store_true", help="write the figures for docs/report.md"
    )
    asked = parser.parse_args()
    possible = tuple(SYSTEMS) if asked.protocol == "steps" else OF_KILLS
    systems = list(dict.fromkeys(asked.systems.split(","))) if asked.systems else list(possible)
    if unknown := set(systems) - set(possible):
        parser.error(f"unknown systems for {asked.protocol}: {', '.join(sorted(unknown))}")
    if "torchft" in systems and not has_torchft("shoal"):
        print(TORCHFT_MISSING, flush=True)
        systems.remove("torchft")
    if not systems:
        raise SystemExit("no system is left to measure")
    torch.set_num_threads(1)
    end_on_sigterm()
    if asked.protocol == "steps":
        name, entries, columns = "long_run", measure_steps(asked, systems), STEPS_COLUMNS
    else:
        name, entries, columns = "kills", measure_kills(asked, systems), KILLS_COLUMNS
    print_entries(name, entries, columns)
    ended = [entry for entry in entries if "failed" not in entry]
    for entry in ended if asked.protocol == "kills" else ():
        print(entry["system"], "growth per kill:", entry["growth_per_kill"])
        print(entry["system"], "/dev/shm:", entry["shm_files"], entry["shm_bytes"])
    if asked.record:
        record(name, entries, keys=KEYS[asked.protocol])


if __name__ == "__main__":
    main()
