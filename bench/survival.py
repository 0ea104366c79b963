"""Steps per second of one job while workers are killed, drained and added: Shoal and torchrun.

    make bench NAME=survival            # three minutes: measure, write the results and the plot
    .venv/bin/python bench/survival.py --plot      # only draw the plot again

Three DDP workers on one machine over Gloo, as in bench/recovery.py: a coordinator with etcd and
`shoal run`; in the same run, three nodes of torchrun with one worker each. Three events strike both
systems at the same times. First a worker gets SIGKILL; its launcher starts another one at once.
Then a worker gets SIGTERM; with torchrun, the agent of a node does. Last, a launcher with one more
worker is started.

A step of the job is counted when its workers have committed it: each worker appends a line to a
file of its own, and in each generation the worker with the most lines counts. torchrun's workers
load no checkpoint after a restart: steps that they would repeat are not shown. Its rendezvous has a
last call of 1 s, and a node that leaves is detected by a keep-alive of 5 x 1 s. Node 0, which hosts
the store of the rendezvous, is neither killed nor drained. A restart imports torch, which takes
longer on a busy machine. The results, with the load of the machine, are in
docs/benchmarks/results/survival.json, the plot in docs/benchmarks/survival.svg.
"""

import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from torchrun import free_port
from training.jobs import START_S, TUNED_RDZV, ShoalJob, logs_in, torchrun_agent
from training.steps import Step, Steps

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.process import Supervisor

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"
RECORD, PLOT = DOCS / "results" / "survival.json", DOCS / "survival.svg"

NUM_WORKERS = 3
STEPS_BEFORE = 100
"""Steps of each worker before the clock starts."""
EVENTS = (("SIGKILL", 5.0), ("SIGTERM", 25.0), ("one more", 45.0))
"""Seconds from the start of the clock, by event; each system has 20 s for each event."""
END_S = 65.0
BIN_S = 0.5

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Three workers that train, and the events that can strike them."""

    directory: Path
    steps: Steps
    kill: Callable[[], object]
    drain: Callable[[], object]
    add: Callable[[], object]


@contextmanager
def shoal_job(directory: Path) -> Iterator[Job]:
    config = LocalClusterConfig(directory=directory / "cluster", num_parameter_servers=0)
    with (
        LocalCluster(config) as cluster,
        ShoalJob(
            cluster, directory / "shoal", max_members=NUM_WORKERS, num_workers=NUM_WORKERS
        ) as job,
    ):
        yield Job(
            directory=directory / "shoal",
            steps=job.steps,
            kill=lambda: os.kill(trained(job.steps)[0], signal.SIGKILL),
            drain=lambda: os.kill(trained(job.steps)[0], signal.SIGTERM),
            add=lambda: job.launch(1),
        )


@contextmanager
def torchrun_job(directory: Path) -> Iterator[Job]:
    place, port = directory / "torchrun", free_port()
    place.mkdir()
    with Supervisor(grace_s=2.0) as supervisor:

        def start(number: int) -> int:
            is_host = "true" if number == 0 else "false"
            node = torchrun_agent(
                place,
                name=f"node-{number}",
                port=port,
                max_nodes=NUM_WORKERS,
                conf=f"{TUNED_RDZV},is_host={is_host}",
                script=("on_torchrun.py", str(place)),
            )
            return supervisor.spawn(node).pid

        steps = Steps(place)
        agents = [start(number) for number in range(NUM_WORKERS)]

        def kill() -> None:
            pids = (pid for pid in trained(steps) if steps.by_pid[pid][-1].agent == agents[1])
            os.kill(next(pids), signal.SIGKILL)

        yield Job(
            directory=place,
            steps=steps,
            kill=kill,
            drain=lambda: os.kill(agents[2], signal.SIGTERM),
            add=lambda: start(NUM_WORKERS),
        )


def trained(steps: Steps) -> list[int]:
    """Return the workers of the newest formation."""
    steps.read()
    newest = max((own[-1] for own in steps.by_pid.values()), key=lambda step: step.at_s)
    formation = newest.formation
    return sorted(pid for pid, own in steps.by_pid.items() if own[-1].formation == formation)


def measure(job: Job) -> dict[str, Any]:
    """Cause the events; return the figures of `pauses_of`."""
    is_full = lambda: bool(job.steps.training(NUM_WORKERS, STEPS_BEFORE))  # noqa: E731
    if not job.steps.await_true(is_full, START_S):
        raise SystemExit(f"no {NUM_WORKERS} workers train:\n{logs_in(job.directory)}")
    began_s = time.monotonic()
    acts = (job.kill, job.drain, job.add)
    for (_, at_s), act in zip(EVENTS, acts, strict=True):
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        act()
    time.sleep(max(0.0, began_s + END_S - time.monotonic()))
    job.steps.read()
    return pauses_of(steps_of(job.steps), began_s)


def steps_of(steps: Steps) -> list[Step]:
    """Steps of the job: in each generation, the steps of the worker that committed the most."""
    formations: dict[int, dict[int, list[Step]]] = {}
    for pid, own in steps.by_pid.items():
        for step in own:
            formations.setdefault(step.formation, {}).setdefault(pid, []).append(step)
    most = [max(by_pid.values(), key=len) for by_pid in formations.values()]
    return sorted((step for each in most for step in each), key=lambda step: step.at_s)


def pauses_of(steps: Sequence[Step], began_s: float) -> dict[str, Any]:
    """Return the steps per second in each bin, the number of workers with the time of each change,
    and the longest pause of each event, in seconds."""
    bins = [0] * int(END_S / BIN_S)
    for step in steps:
        if 0 <= (at := int((step.at_s - began_s) / BIN_S)) < len(bins) and step.at_s >= began_s:
            bins[at] += 1
    seen = [step for step in steps if step.at_s >= began_s]
    workers = [[0.0, seen[0].world_size]]
    for before, after in pairwise(seen):
        if after.world_size != before.world_size:
            workers.append([round(after.at_s - began_s, 3), after.world_size])
    starts = [at_s for _, at_s in EVENTS]
    pauses = {}
    for (name, at_s), until_s in zip(EVENTS, [*starts[1:], END_S], strict=True):
        within = [step.at_s - began_s for step in seen if at_s < step.at_s - began_s < until_s]
        pauses[name] = round(max(b - a for a, b in pairwise([at_s, *within, until_s])), 3)
    return {
        "steps_per_s": [number / BIN_S for number in bins],
        "workers": workers,
        "longest_pause_s": pauses,
    }


# The plot: one panel for each system, all on one scale.

WIDTH, PANEL, TOP, LEFT, RIGHT, GAP, FOOT = 760, 120, 76, 34, 8, 64, 60
COLOURS = {"Shoal": "#009688", "torchrun": "#a0703c"}
LABELS = {
    "SIGKILL": "kill -9 of a worker",
    "SIGTERM": "SIGTERM drains a worker",
    "one more": "one more worker is started",
}
FOOTNOTE = (
    "torchrun starts all workers again, and they import torch; the machine was shared"
    " (load {load:.0f}).",
    "Not shown: its workers also repeat the steps since their last checkpoint.",
)


def plot(record: Record) -> str:
    events, end_s = record["events_s"], record["end_s"]
    bottom = TOP + len(record["systems"]) * (PANEL + GAP) - GAP + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + FOOT}"'
        ' font-family="sans-serif" font-size="12" fill="#808080">',
        f'<text x="0" y="14">Steps per second of one job of {NUM_WORKERS} DDP workers'
        f" ({record['machine']['cores']} CPU cores, Gloo)</text>",
    ]
    for name, at_s in events.items():
        x = at_x(at_s, end_s)
        parts += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="36" y2="{bottom}" stroke="#d84343"'
            ' stroke-dasharray="3 3"/>',
            f'<text x="{x + 5:.1f}" y="46" fill="#d84343">{LABELS[name]}</text>',
        ]
    for number, name in enumerate(record["systems"]):
        parts += panel(name, record, TOP + number * (PANEL + GAP))
    for tick in range(0, int(end_s) + 1, 10):
        x = at_x(tick, end_s)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick} s</text>')
    load = sum(record["machine"]["load_1min"]) / len(record["machine"]["load_1min"])
    parts += [
        f'<text x="0" y="{bottom + 36 + 16 * number}">{line.format(load=load)}</text>'
        for number, line in enumerate(FOOTNOTE)
    ]
    return "\n".join([*parts, "</svg>", ""])


def at_x(at_s: float, end_s: float) -> float:
    return LEFT + at_s / end_s * (WIDTH - LEFT - RIGHT)


def panel(name: str, record: Record, top: float) -> list[str]:
    """Draw the rate over time on one scale for all systems, and the longest pause of each event."""
    base, colour, end_s = top + PANEL, COLOURS[name], record["end_s"]
    measured = record["systems"][name]
    high = -(-max(max(each["steps_per_s"]) for each in record["systems"].values()) // 20) * 20
    outline = [f"M{at_x(0, end_s):.1f},{base}"]
    for index, rate in enumerate(measured["steps_per_s"]):
        y = base - rate / high * PANEL
        for edge in (index, index + 1):
            outline.append(f"L{at_x(edge * record['bin_s'], end_s):.1f},{y:.1f}")
    outline.append(f"L{at_x(end_s, end_s):.1f},{base}Z")
    parts = [
        f'<path d="{"".join(outline)}" fill="{colour}" fill-opacity="0.75"/>',
        f'<text x="0" y="{top - 8}" fill="{colour}" font-weight="bold"'
        f' font-size="14">{name}</text>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = base - share * PANEL
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8886"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * high:.0f}</text>',
        ]
    starts = record["events_s"]
    for (event, at_s), until_s in zip(
        starts.items(), [*list(starts.values())[1:], end_s], strict=True
    ):
        # Without a step at the end of this span, the pause was longer than measured.
        is_cut = not measured["steps_per_s"][int(until_s / record["bin_s"]) - 1]
        pause_s = f"{'over ' if is_cut else ''}{measured['longest_pause_s'][event]:.2g} s"
        pause = escape(f"longest pause {pause_s}")
        parts.append(f'<text x="{at_x(at_s, end_s) + 5:.1f}" y="{top - 3}">{pause}</text>')
    return [*parts, *roster(measured, record["bin_s"], end_s, base + 9, colour)]


def roster(measured: Record, bin_s: float, end_s: float, y: float, colour: str) -> list[str]:
    """Draw the number of workers below a panel; no bar while the job takes no step."""
    by_bin = [
        0 if not rate else max(w for w in measured["workers"] if w[0] <= (index + 1) * bin_s)[1]
        for index, rate in enumerate(measured["steps_per_s"])
    ]
    parts, start = [], 0
    for number, bins in groupby(by_bin):
        stop = start + len(list(bins))
        x1, x2 = at_x(start * bin_s, end_s) + 1, at_x(stop * bin_s, end_s) - 1
        start = stop
        if not number or x2 - x1 < 8:
            continue
        label = f"{number} workers" if x2 - x1 > 60 else f"{number}"
        parts += [
            f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y}" y2="{y}" stroke="{colour}"'
            f' stroke-width="{2 * number}"/>',
            f'<text x="{(x1 + x2) / 2:.1f}" y="{y + 18}" text-anchor="middle">{label}</text>',
        ]
    return parts


def main() -> None:
    if "--plot" not in sys.argv:
        load = [os.getloadavg()[0]]
        systems = {}
        with tempfile.TemporaryDirectory() as name:
            for system, job in (("Shoal", shoal_job), ("torchrun", torchrun_job)):
                with job(Path(name)) as running:
                    systems[system] = measure(running)
                load.append(os.getloadavg()[0])
                print(f"{system}: {systems[system]['longest_pause_s']}", flush=True)
        record = {
            "day": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "cores": len(os.sched_getaffinity(0)),
                "kind": platform.machine(),
                "load_1min": [round(each, 2) for each in load],
            },
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "events_s": dict(EVENTS),
            "end_s": END_S,
            "bin_s": BIN_S,
            "systems": systems,
        }
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record) + "\n")
    PLOT.write_text(plot(json.loads(RECORD.read_text())))
    print(f"written to {RECORD} and {PLOT}")


if __name__ == "__main__":
    main()
