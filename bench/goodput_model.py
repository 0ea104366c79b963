"""Effective time of systems at scale, computed from a number of machines and their failure rate.

    .venv/bin/python bench/goodput_model.py --record

The effective time is the share of the time in which a job makes progress. Failures of machines are
a Poisson process; a job of N machines has one every M = machine MTBF / N. A system that continues
in place pauses for p seconds at each failure, and a failure during the pause starts the pause
again: the effective time is exp(-p / M). A system that restarts from a checkpoint pauses for R
seconds and repeats the steps after the checkpoint. Checkpoints cost C seconds each, and are written
at the best interval t (Daly 2006): the effective time is
t / (M exp(R / M) (exp((t + C) / M) - 1)).

Constants are *measured* (from docs/benchmarks/results, on four workers of one machine: costs that
grow with the number of machines or with the size of a state are not included) or *published* by
others, with the source. Published points are not computed here. A system whose constant was not
measured is left out. Writes docs/benchmarks/results/goodput_model.json and
docs/benchmarks/goodput_model.svg with `--record`.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from charts import Line, lines
from rows import OF_RECORD, print_entries, record
from training.effective import daly_interval_s

MACHINES = tuple(2**power for power in range(3, 18))
GPUS_A_MACHINE = 8
LLAMA_3 = "Llama 3 (arXiv 2407.21783): 419 unexpected interruptions in 54 days of 16,384 GPUs"
LLAMA_3_MTBF_H = 54 * 24 * (16_384 / GPUS_A_MACHINE) / 419
MTBF_H = (LLAMA_3_MTBF_H, 1000.0)
"""Hours between failures of one machine: as published, and of a less reliable machine."""


@dataclass(frozen=True, kw_only=True)
class System:
    """Constants of a system."""

    name: str
    kind: str
    """"measured" or "published"."""
    source: str
    pause_s: float
    """Seconds lost at each failure; for a system that restarts, without the repeated steps."""
    checkpoint_s: float | None = None
    """Time of a checkpoint; None: the system continues in place."""

    def effective(self, mtbf_s: float) -> float:
        """Effective time of a job with a failure every `mtbf_s`."""
        if self.checkpoint_s is None:
            return math.exp(-self.pause_s / mtbf_s)
        return restarted(self.checkpoint_s, self.pause_s, mtbf_s)


def restarted(checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Effective time of a job that restarts from the newest checkpoint at each failure."""
    interval_s = daly_interval_s(checkpoint_s, mtbf_s)
    exponent = restart_s / mtbf_s, (interval_s + checkpoint_s) / mtbf_s
    if sum(exponent) > 700:
        return 0.0
    return interval_s / (mtbf_s * math.exp(exponent[0]) * math.expm1(exponent[1]))


FT_HSDP = "Training LLMs with Fault Tolerant HSDP on 100,000 GPUs (arXiv 2602.00277)"
HYPERPOD = (
    "Checkpointless training on Amazon SageMaker HyperPod: production-scale training with faster"
    " fault recovery (AWS, December 2025)"
)
OOBLECK = "Oobleck (SOSP 2023, arXiv 2309.08125), by its simulator: a failure every 10 minutes"
PUBLISHED = (
    System(
        name="synchronous training of FT-HSDP's paper",
        kind="published",
        source=f"{FT_HSDP}: a stall of 10 minutes",
        pause_s=600.0,
    ),
    System(
        name="FT-HSDP",
        kind="published",
        source=f"{FT_HSDP}: a stall of 3 minutes",
        pause_s=180.0,
    ),
    System(
        name="HyperPod, checkpointless",
        kind="published",
        source=f"{HYPERPOD}: recovery in under 2 minutes",
        pause_s=120.0,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Effective time that others published, on their own machines and definitions."""

    name: str
    gpus: int | None
    """Number of GPUs; None if the source gives none, or a word such as "thousands"."""
    effective: float
    source: str


POINTS = (
    Point(name="synchronous, FT-HSDP's paper", gpus=100_000, effective=0.44, source=FT_HSDP),
    Point(name="FT-HSDP", gpus=100_000, effective=0.80, source=FT_HSDP),
    Point(
        name="ByteRobust",
        gpus=9_600,
        effective=0.97,
        source="Robust LLM Training Infrastructure at ByteDance (arXiv 2509.16293): three months",
    ),
    Point(name="Llama 3", gpus=16_384, effective=0.90, source=f"{LLAMA_3}: more than 90 %"),
    Point(
        name="HyperPod, checkpointless",
        gpus=None,
        effective=0.95,
        source=f"{HYPERPOD}: up to 95 % with thousands of accelerators",
    ),
    Point(name="Oobleck", gpus=None, effective=0.955, source=OOBLECK),
    Point(name="Varuna, in Oobleck's paper", gpus=None, effective=0.544, source=OOBLECK),
    Point(name="Bamboo, in Oobleck's paper", gpus=None, effective=0.150, source=OOBLECK),
)


def results(name: str) -> list[Mapping[str, Any]]:
    """Recorded entries of a bench; none if it was not measured."""
    path = OF_RECORD / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def measured(steps: Sequence[Mapping[str, Any]]) -> list[System]:
    """Systems with the constants that `bench/long_run.py steps` measured."""
    found = []
    for name in dict.fromkeys(entry["system"] for entry in steps):
        own = [entry for entry in steps if entry["system"] == name and entry.get("kills")]
        if not own:
            continue
        costs_s = [entry["checkpoint_s"] for entry in own if entry.get("checkpoint_s") is not None]
        found.append(
            System(
                name=name,
                kind="measured",
                source="bench/long_run.py steps",
                pause_s=max(0.0, median(map(pause_of_kill_s, own))),
                checkpoint_s=median(costs_s) if costs_s else None,
            )
        )
    return found


def pause_of_kill_s(entry: Mapping[str, Any]) -> float:
    """The pause per kill: stalls of the run, minus those of the run without kills.

    Stalls contain the steps that are taken again. If a system continues in place, they are part of
    its pause. If it restarts from a checkpoint, they are subtracted: their number depends on the
    interval between checkpoints, which this model computes.
    """
    stalled_s = entry["stalled_s"] - entry["stalled_without_s"]
    if entry.get("checkpoint_s") is not None:
        stalled_s -= entry["steps_twice"] * entry["step_s"]
    return float(stalled_s) / entry["kills"]


def curves(systems: Sequence[System]) -> list[dict[str, Any]]:
    """Effective time for each system, time between failures and number of machines."""
    return [
        {
            "what": "computed",
            "system": system.name,
            "constants": system.kind,
            "source": system.source,
            "pause_s": system.pause_s,
            "checkpoint_s": system.checkpoint_s,
            "machine_mtbf_h": mtbf_h,
            "effective": {
                str(machines): system.effective(3600 * mtbf_h / machines) for machines in MACHINES
            },
        }
        for mtbf_h in MTBF_H
        for system in systems
    ]


def points() -> list[dict[str, Any]]:
    return [{"what": "published", "system": each.name, **asdict(each)} for each in POINTS]


def figure(systems: Sequence[System]) -> str:
    """Curves of all systems at the published time between failures, and the published points."""
    series = [
        Line(
            label=f"{system.name}: {system.pause_s:.3g} s a failure, {system.kind}",
            points=[(each, system.effective(3600 * MTBF_H[0] / each)) for each in MACHINES],
            is_own=system.name.startswith("shoal"),
        )
        for system in systems
    ]
    series += [
        Line(
            label=f"{each.name}: {100 * each.effective:.0f} % of {each.gpus:,} GPUs, as published",
            points=[(each.gpus / GPUS_A_MACHINE, each.effective)],
            is_points=True,
        )
        for each in POINTS
        if each.gpus is not None
    ]
    title = f"machines of 8 GPUs; one fails every {MTBF_H[0]:,.0f} hours"
    return lines(series, x_title=title, x_ticks=MACHINES[::2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    systems = [*measured(results("long_run")), *PUBLISHED]
    entries = curves(systems)
    shown = [
        {**entry, **{f"{n:,}": entry["effective"][str(n)] for n in MACHINES[::4]}}
        for entry in entries
    ]
    columns = ("system", "constants", "machine_mtbf_h", *(f"{n:,}" for n in MACHINES[::4]))
    print_entries("effective time by number of machines", shown, columns)
    if asked.record:
        path = OF_RECORD / "goodput_model.json"
        path.unlink(missing_ok=True)
        keys = ("what", "system", "machine_mtbf_h", "gpus")
        record("goodput_model", [*entries, *points()], keys=keys)
        (OF_RECORD.parent / "goodput_model.svg").write_text(figure(systems))


if __name__ == "__main__":
    main()
