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
steps; None of a system that does not train any more at the end. With `--record` they go to
docs/benchmarks/results/trace.json, for docs/report.md.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from exactness import difference, result
from recovery import TORCHFT_MISSING, Stuck, has_torchft
from rows import print_entries, record
from training.changes import (
    KEYS,
    Change,
    add_arguments,
    changes_asked,
    described,
    interruption_s,
    starting,
)
from training.effective import checkpoint_every, effective
from training.exactness import checkpoint_and_step_s, one_process_at
from training.machines import ONE_PROCESS, SYSTEMS, Machines, NotTraining, Plan

PAUSE_S = 0.03


def replay(
    system: str, plan: Plan, changes: Sequence[Change], length_s: float, notice_s: float
) -> tuple[dict[str, Any], int, Any]:
    """Figures of one system, and the steps and weights that it ended with; 0 and None of one that
    does not train at the end."""
    plan.directory.mkdir()
    first, later = starting(changes)
    if system == ONE_PROCESS:
        first, later = first[:1], []
    with SYSTEMS[system](plan) as running, Machines(plan, running) as machines:
        run = machines.replay(first, later, length_s, notice_s)
        found = effective(run.steps, run.start_s, run.start_s + length_s)
        figures = {
            **asdict(found),
            "changes": run.num_changes,
            "paused_per_change_s": found.paused_per_change_s(run.num_changes),
            "relaunches": machines.num_relaunches,
        }
        print(f"{system}: {figures}", flush=True)
        try:
            return figures, *result(machines.steps, plan.directory)
        except Stuck as error:
            print(f"{system} does not train at the end: {error}", flush=True)
            return figures, 0, None


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
                **described(asked),
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
            except NotTraining as error:
                print(f"{system} is left out: {error}", flush=True)
                continue
            entries.append({**entry, **figures})
            ended.append((entries[-1], *end))
    expected = one_process_at(num_steps for _, num_steps, _ in ended)
    for entry, num_steps, weights in ended:
        entry["steps"] = num_steps
        entry["distance"] = None if weights is None else difference(weights, expected[num_steps])
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
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
