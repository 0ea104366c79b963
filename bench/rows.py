"""Output of a benchmark: rows in bench/results/NAME.json, or committed entries of a comparison."""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
OF_RECORD = Path(__file__).parents[1] / "docs" / "benchmarks" / "results"
"""Committed results, which docs/report.md shows."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure of a benchmark."""

    metric: str
    value: float
    """Figure of Shoal; the median of several runs."""
    unit: str
    runs: int
    peer: str | None = None
    """The system measured for comparison, on the same machine in the same run."""
    peer_value: float | None = None

    def as_json(self) -> dict[str, str | float | int]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; the largest value if there are fewer than 100."""
    return quantiles(values, n=100)[-1] if len(values) >= 100 else max(values)


def spread(metric: str, values: Sequence[float], unit: str) -> list[Row]:
    """Return two rows, METRIC_p50 and METRIC_p99, of values of which lower ones are better; also
    print them in one line."""
    middle, high = median(values), p99(values)
    print(f"{metric}: p50 {middle:.4g} {unit}, p99 {high:.4g} {unit}, {len(values)} runs")
    return [
        Row(metric=f"{metric}_{name}", value=value, unit=unit, runs=len(values))
        for name, value in (("p50", middle), ("p99", high))
    ]


def publish(name: str, rows: Sequence[Row], *, adds: bool = False) -> Path:
    """Print the rows as a table and write bench/results/NAME.json. With `adds`, keep rows of other
    metrics or peers in the file."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    found = [row.as_json() for row in rows]
    if adds and path.exists():
        new = {(row.metric, row.peer) for row in rows}
        kept = json.loads(path.read_text())
        found = [e for e in kept if (e["metric"], e.get("peer")) not in new] + found
    path.write_text(json.dumps(found, indent=2) + "\n")
    peers = any(row.peer for row in rows)
    table = Table(title=name)
    for column in ("metric", "value", "unit", "runs", *(("peer", "peer's value") if peers else ())):
        table.add_column(column)
    for row in rows:
        cells = [row.metric, f"{row.value:.4g}", row.unit, str(row.runs)]
        if peers:
            cells += [row.peer or "", "" if row.peer_value is None else f"{row.peer_value:.4g}"]
        table.add_row(*cells)
    console = Console()
    # Wide enough that a log without a terminal does not cut names of metrics off.
    Console(width=console.width if console.is_terminal else 120).print(table)
    print(f"written to {path}")
    return path


def print_entries(title: str, entries: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a table of the entries that a comparison measured."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for entry in entries:
        table.add_row(*(cell_text(entry.get(column)) for column in columns))
    Console(width=max(80, 18 * len(columns))).print(table)


def cell_text(value: object) -> str:
    """A value with few digits; several values are joined by slashes."""
    if isinstance(value, list | tuple):
        return " / ".join(map(cell_text, value))
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def first_line(error: Exception) -> str:
    """The message without the logs that follow it."""
    return str(error).partition("\n")[0].rstrip(":")


def command_line() -> str:
    """The command by which this script was started, from the root of the repository. A file
    that was given by its full path is shown without its folder."""
    arguments = [Path(each).name if each.startswith("/") else each for each in sys.argv[1:]]
    return " ".join([f"bench/{Path(sys.argv[0]).name}", *arguments])


def record(name: str, entries: Sequence[Mapping[str, Any]], *, keys: Sequence[str]) -> Path:
    """Write docs/benchmarks/results/NAME.json, for docs/report.md.

    Entries that agree with an older one in all keys replace it; the others stay, so that several
    runs make one table. Each entry records the day, the machine and the command of its measurement.
    """
    path = OF_RECORD / f"{name}.json"
    stamp = {
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "command": command_line(),
    }
    older = json.loads(path.read_text()) if path.exists() else []
    merged = {tuple(each.get(key) for key in keys): each for each in older}
    for entry in entries:
        merged[tuple(entry.get(key) for key in keys)] = {**entry, **stamp}
    path.parent.mkdir(parents=True, exist_ok=True)
    # A full disk leaves the older entries.
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(list(merged.values()), indent=1) + "\n")
    whole.replace(path)
    print(f"written to {path}")
    return path
