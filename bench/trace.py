"""Effective training time while machines join and are lost: Shoal, torchrun, torchft, one process.

    .venv/bin/python bench/trace.py --trace FILE --speed 60
    .venv/bin/python bench/trace.py --mtbf 10 --seconds 600 --seed 1 --record

Replays changes on real processes (`training/machines.py`), the same changes for each system. With
`--trace` they are read from a trace (`milliseconds,add|remove,node`), of which only the number of
nodes at each time counts. If the trace ever has more than `--max` nodes, all its numbers are scaled
to 1 to `--max` by quantile. With `--mtbf` they are drawn by `--seed`: losses are a Poisson process
with a mean of `--mtbf` minutes between two losses of the job, and a lost machine is replaced after
5 minutes on average. Changes are replayed `--speed` times as fast; the start of Python and torch
takes its real time. A loss is a SIGKILL of all processes of the machine; with `--notice S`, its
launcher gets a SIGTERM S seconds before. At least one machine that has run for 15 s always stays,
and the coordinator or rendezvous of a system is not lost.

All systems train the model of bench/exactness.py on the same batches. Each step has the same pause
in place of work on a device, so that two cores are enough for 4 workers. torchrun restarts all
workers at each change, from a checkpoint every k steps; k follows Young and Daly, from the times of
a checkpoint and a step, which this bench measures first, and the mean time between changes. torchft
and Shoal write no checkpoint. SHOAL_BENCH_TORCHFT names torchft's interpreter, as in
bench/recovery.py. This interpreter needs Shoal too, whose order of samples all systems share.

`training/effective.py` defines the figures of each system; the clock starts once all first machines
train. `distance`: largest difference of a weight from training in one process after as many steps;
none for a system that does not train at the end. With `--record` the figures are written to
docs/benchmarks/results/trace.json, for docs/report.md; for a system that did not start, or whose
replay was given up, the reason (`failed`).
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
from rows import first_line, print_entries, record
from training.changes import (
    KEYS,
    Change,
    add_arguments,
    changes_asked,
    described,
    interruption_s,
    seconds,
    starting,
)
from training.effective import checkpoint_every, effective
from training.exactness import checkpoint_and_step_s, one_process_at
from training.machines import ONE_PROCESS, SYSTEMS, Machines, NotTraining, Plan, end_on_sigterm

PAUSE_S = 0.03


def replay(
    system: str, plan: Plan, changes: Sequence[Change], length_s: float, notice_s: float
) -> tuple[dict[str, Any], int, Any]:
    """Return the figures of one system, and the steps and weights at its end; 0 and None if it does
    not train at the end. No step was useful then."""
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
            nothing = effective([], run.start_s, run.start_s + length_s)
            return {**figures, **asdict(nothing)}, 0, None


def measure(
    asked: argparse.Namespace, systems: Sequence[str], changes: Sequence[Change], length_s: float
) -> list[dict[str, Any]]:
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
                print(f"{system} does not train: {error}", flush=True)
                entries.append({**entry, "failed": first_line(error)})
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
    parser.add_argument(
        "--systems",
        default=",".join(SYSTEMS),
        help=f"names with commas between them (all by default): {', '.join(SYSTEMS)}",
    )
    parser.add_argument("--pause", type=seconds, default=PAUSE_S, help="seconds in each step")
    parser.add_argument(
        "--record", action="store_true", help="write the figures for docs/report.md"
    )
    asked = parser.parse_args()
    changes, length_s = changes_asked(parser, asked)
    systems = list(dict.fromkeys(asked.systems.split(",")))
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}; known: {', '.join(SYSTEMS)}")
    if "torchft" in systems and not has_torchft("shoal"):
        print(TORCHFT_MISSING, flush=True)
        systems.remove("torchft")
    if not systems:
        raise SystemExit("no system is left to measure")
    torch.set_num_threads(1)
    end_on_sigterm()
    entries = measure(asked, systems, changes, length_s)
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
