"""Updates of async-sgd that survive while machines join and are lost.

    .venv/bin/python bench/async_trace.py --trace FILE --speed 60 --record
    .venv/bin/python bench/async_trace.py --mtbf 10 --seconds 100 --seed 1 --record

Machines change as in bench/trace.py, with the same options; no parameter server is lost. Each
sample adds 1 to a weight of its own, so the final weights show how often each sample was trained
on. Each worker logs the samples of every acknowledged push.

`pushes`: logged pushes. `samples_lost`: samples that were logged and are not in the weights.
`samples_unlogged`: samples that are in the weights and were not logged. A machine that is killed
between an acknowledgement and the line in its log leaves the samples of one push. If there are more
than the losses explain, a push was applied twice, and the bench ends. `longest_pause_s`: longest
time without any push.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rows import print_entries, record
from torch import Tensor
from training.changes import KEYS, Change, add_arguments, changes_asked, described, starting
from training.jobs import logs_in
from training.machines import Machines, NotTraining, Plan, end_on_sigterm, shoal_async_sgd

PAUSE_S = 0.03
END_S = 60.0
SAMPLES_OF_A_PUSH = 64


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The difference between the weights and the logs of the workers."""

    pushes: int
    samples_lost: int
    samples_unlogged: int


def counted(weights: Iterable[Tensor], logs: Iterable[Sequence[str]]) -> Counted:
    """Compare the newest weights that workers wrote with all logs.

    A weight only grows, so its largest value is the newest. The last line of a killed worker's log
    may be cut off.
    """
    newest = torch.stack(list(weights)).amax(0).long()
    written = torch.zeros_like(newest)
    pushes = 0
    for lines in logs:
        for line in lines:
            if line.endswith("\n"):
                written.scatter_add_(0, torch.tensor(json.loads(line)), torch.ones_like(newest))
                pushes += 1
    missing = written - newest
    return Counted(
        pushes=pushes,
        samples_lost=int(missing.clamp(min=0).sum()),
        samples_unlogged=int((-missing).clamp(min=0).sum()),
    )


def replay(
    plan: Plan, changes: Sequence[Change], length_s: float, notice_s: float
) -> dict[str, Any]:
    plan.directory.mkdir()
    first, later = starting(changes)
    losses = sum(not each.joins for each in later if each.at_s < length_s)
    with shoal_async_sgd(plan) as running, Machines(plan, running) as machines:
        run = machines.replay(first, later, length_s, notice_s)
        (plan.directory / "stop").touch()
        await_weights(plan.directory, len(machines.names))
    start_s, end_s = run.start_s, run.start_s + length_s
    at_s = sorted(step.at_s for step in run.steps if start_s <= step.at_s < end_s)
    found = counted(
        (torch.load(path) for path in plan.directory.glob("weights-*.pt")),
        (path.read_text().splitlines(True) for path in plan.directory.glob("samples-*")),
    )
    if found.samples_unlogged > losses * SAMPLES_OF_A_PUSH:
        raise SystemExit(f"{found} with {losses} losses: a push was applied twice")
    return {
        "changes": run.num_changes,
        "losses": losses,
        "wall_s": length_s,
        "pushes_per_s": len(at_s) / length_s,
        "longest_pause_s": max(after - at for at, after in pairwise([start_s, *at_s, end_s])),
        "pushes": found.pushes,
        "samples_lost": found.samples_lost,
        "samples_unlogged": found.samples_unlogged,
    }


def await_weights(directory: Path, num_workers: int) -> None:
    """Return once every worker has written its weights. Raises NotTraining after END_S."""
    give_up_s = time.monotonic() + END_S
    while len(list(directory.glob("weights-*.pt"))) < num_workers:
        if time.monotonic() > give_up_s:
            raise NotTraining(f"not all workers ended within {END_S:g} s:\n{logs_in(directory)}")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    changes, length_s = changes_asked(parser, asked)
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as name:
        plan = Plan(
            directory=Path(name) / "shoal-async-sgd",
            pause_s=PAUSE_S,
            max_machines=asked.max,
            checkpoint_every=0,
        )
        figures = replay(plan, changes, length_s, asked.notice)
    entries = [{**described(asked), "system": "shoal-async-sgd", **figures}]
    columns = ("system", "changes", "losses", "pushes", "pushes_per_s", "longest_pause_s")
    print_entries("async_trace", entries, (*columns, "samples_lost", "samples_unlogged"))
    if asked.record:
        record("async_trace", entries, keys=KEYS)


if __name__ == "__main__":
    main()
