"""Effective time while machines join and are lost, of Shoal beside torchrun, torchft, one process.

    .venv/bin/python bench/trace.py --trace FILE --speed 60
    .venv/bin/python bench/trace.py --mtbf 10 --seconds 600 --seed 1 --record

Replays changes on real processes (`training/machines.py`), the same for each system: of a trace
(`milliseconds,add|remove,node`), with 1 to `--max` machines by the quantiles of its numbers of
nodes; or losses drawn by `--seed` as a Poisson process with a mean of `--mtbf` minutes between two
of the whole job, each machine replaced after 5 minutes on average. Minutes of a trace pass
`--speed` times as fast; what a start of Python and torch takes does not. A loss is a SIGKILL of all
processes of the machine; with `--notice S`, a SIGTERM S seconds before. One settled machine always
stays, and what the machines meet at is not lost.

All systems train the model of bench/exactness.py on the same batches with the same pause in each
step, which stands for a device: 4 workers fit on two cores. torchrun restarts all workers at each
change, from a checkpoint every k steps; k by Young and Daly from the cost of a checkpoint and the
step that this bench measures first, and the mean time between changes. torchft and Shoal write no
checkpoint. torchft comes from SHOAL_BENCH_TORCHFT as in bench/recovery.py; that interpreter needs
Shoal too, whose order of samples all systems share.

Figures of each system are defined in `training/effective.py`; the clock starts when all machines
of the start train. `distance` is the largest difference of a weight from one process after as many
steps. With `--record` they go to docs/benchmarks/results/trace.json, for docs/report.md.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from exactness import difference, result
from recovery import TORCHFT_MISSING, Stuck, has_torchft
from rows import print_entries, record
from training.changes import (
    Change,
    changes_of,
    interruption_s,
    poisson,
    read_trace,
    scaled,
    starting,
)
from training.effective import checkpoint_every, effective
from training.exactness import checkpoint_and_step_s, one_process_at
from training.machines import ONE_PROCESS, START_S, SYSTEMS, Machines, NotTraining, Plan

PAUSE_S = 0.03
REPLACED_AFTER_MIN = 5.0
STEPS_BEFORE = 30
KEYS = ("trace", "mtbf_min", "speed", "seed", "system")


def replay(
    system: str, plan: Plan, changes: Sequence[Change], length_s: float, notice_s: float
) -> tuple[dict[str, Any], int, Any]:
    """Figures of one system, and the steps and weights that it ended with."""
    plan.directory.mkdir()
    first, later = starting(changes)
    if system == ONE_PROCESS:
        first, later = first[:1], []
    with SYSTEMS[system](plan) as running, Machines(plan, running) as machines:
        for name in first:
            machines.join(name)
        machines.await_training(len(first), STEPS_BEFORE, START_S)
        start_s = time.monotonic()
        num_changes = 0
        for change in later:
            if change.at_s >= length_s:
                break
            time.sleep(max(0.0, start_s + change.at_s - time.monotonic()))
            if change.joins:
                machines.join(change.machine)
            else:
                machines.lose(change.machine, notice_s)
            num_changes += 1
            print(f"{system}: {change}", flush=True)
        time.sleep(max(0.0, start_s + length_s - time.monotonic()))
        machines.steps.read()
        steps = [step for own in machines.steps.by_pid.values() for step in own]
        found = effective(steps, start_s, start_s + length_s)
        figures = {
            **asdict(found),
            "changes": num_changes,
            "paused_per_change_s": found.paused_per_change_s(num_changes),
            "relaunches": machines.num_relaunches,
        }
        print(f"{system}: {figures}", flush=True)
        num_steps, weights = result(machines.steps, plan.directory)
    return figures, num_steps, weights


def measure(asked: argparse.Namespace, systems: Sequence[str]) -> list[dict[str, Any]]:
    changes, length_s = changes_asked(asked)
    cost_s, step_s = checkpoint_and_step_s()
    every = checkpoint_every(cost_s, interruption_s(changes, length_s), asked.pause + step_s)
    print(f"a checkpoint takes {cost_s * 1e3:.1f} ms: one every {every} steps", flush=True)
    entries: list[dict[str, Any]] = []
    ended: list[tuple[dict[str, Any], int, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for system in systems:
            entry = {
                "trace": Path(asked.trace).stem if asked.trace else "poisson",
                "mtbf_min": None if asked.trace else asked.mtbf,
                "speed": asked.speed,
                "seed": asked.seed,
                "notice_s": asked.notice,
                "system": system,
                "checkpoint_every": every if system == "torchrun" else None,
                "pause_s": asked.pause,
            }
            plan = Plan(
                directory=Path(name) / system,
                pause_s=asked.pause,
                max_machines=asked.max,
                checkpoint_every=every,
            )
            try:
                figures, *end = replay(system, plan, changes, length_s, asked.notice)
            except (NotTraining, Stuck) as error:
                print(f"{system} is left out: {error}", flush=True)
                continue
            entries.append({**entry, **figures})
            ended.append((entries[-1], *end))
    expected = one_process_at(num_steps for _, num_steps, _ in ended)
    for entry, num_steps, weights in ended:
        entry["steps"] = num_steps
        entry["distance"] = difference(weights, expected[num_steps])
    return entries


def changes_asked(asked: argparse.Namespace) -> tuple[list[Change], float]:
    """The changes, and for how long they are replayed."""
    if asked.trace:
        with Path(asked.trace).open() as lines:
            levels = read_trace(lines, asked.speed)
        whole_s = levels[-1].at_s - levels[0].at_s
        return changes_of(scaled(levels, asked.max), asked.seed), asked.seconds or whole_s
    length_s = asked.seconds or 600.0
    changes = poisson(
        seed=asked.seed,
        mtbf_s=60.0 * asked.mtbf / asked.speed,
        replaced_after_s=60.0 * REPLACED_AFTER_MIN / asked.speed,
        num_machines=asked.max,
        length_s=length_s,
    )
    return changes, length_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", help="a file of lines milliseconds,add|remove,node")
    source.add_argument("--mtbf", type=float, help="minutes between two losses, on average")
    parser.add_argument("--speed", type=float, default=60.0, help="trace time over real time")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--max", type=int, default=4, help="machines at once, at most")
    parser.add_argument("--seconds", type=float, help="end after so long (600 without a trace)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--notice", type=float, default=0.0, help="seconds before each loss")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds in each step")
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    systems = asked.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there is {', '.join(SYSTEMS)}")
    if "torchft" in systems and not has_torchft("shoal"):
        print(TORCHFT_MISSING, flush=True)
        systems.remove("torchft")
    torch.set_num_threads(1)
    entries = measure(asked, systems)
    print_entries(
        "trace",
        entries,
        (
            "system",
            "effective",
            "steps_per_s",
            "step_s",
            "steps_twice",
            "steps_lost",
            "paused_per_change_s",
            "longest_pause_s",
            "relaunches",
            "distance",
        ),
    )
    if asked.record:
        record("trace", entries, keys=KEYS)


if __name__ == "__main__":
    main()
