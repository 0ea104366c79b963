"""Writes docs/benchmarks.md and its plots from bench/results: every benchmark that was run here.

    make report

It also writes the tables and figures of docs/report.md, from docs/benchmarks/results.

Sections of benchmarks without a result in bench/results stay unchanged, with their date. The
section `gpu` is made from docs/benchmarks/results/gpu.json, which `make gpu-test` writes on a
machine with a GPU.
"""

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peer_report
from charts import Bar, bars
from rows import RESULTS, cell_text

DOCS = Path(__file__).parents[1] / "docs"
ON_GPU = DOCS / "benchmarks" / "results" / "gpu.json"

Rows = Sequence[Mapping[str, Any]]


def main() -> None:
    """Write the pages, and a plot for each benchmark with figures of a peer."""
    write_peer_report()
    page = DOCS / "benchmarks.md"
    found = {path.stem: path for path in sorted(RESULTS.glob("*.json"))}
    if not found and not ON_GPU.exists():
        print(f"{page} stays as it is: no results in {RESULTS}; make bench NAME=recovery makes one")
        return
    sections = sections_of(page.read_text()) if page.exists() else {}
    for name, path in found.items():
        rows: Rows = json.loads(path.read_text())
        compared = [row for row in rows if row.get("peer_value") is not None]
        if compared:
            target = DOCS / "benchmarks" / f"{name}.svg"
            target.parent.mkdir(exist_ok=True)
            target.write_text(plot(compared))
        sections[name] = section(name, rows, path.stat().st_mtime, plotted=bool(compared))
    if ON_GPU.exists():
        sections["gpu"] = gpu_section(json.loads(ON_GPU.read_text()))
    page.write_text("\n".join([introduction(), *(sections[name] for name in sorted(sections))]))
    print(
        f"written to {page}: {', '.join(sorted({*found, *(['gpu'] if ON_GPU.exists() else [])}))}"
    )


def write_peer_report() -> None:
    """Write the blocks of docs/report.md, and its figures."""
    page = DOCS / peer_report.PAGE
    if not page.exists():
        return
    results = results_of_record()
    page.write_text(peer_report.page_with(page.read_text(), results))
    for name, figure in peer_report.figures(results).items():
        (DOCS / "benchmarks" / f"{name}.svg").write_text(figure)
    print(f"written to {page}, from {ON_GPU.parent}: {', '.join(sorted(results))}")


def results_of_record() -> dict[str, Rows]:
    """The committed results of the benches that docs/report.md shows, by name."""
    paths = ((name, ON_GPU.parent / f"{name}.json") for name in peer_report.BLOCKS)
    return {name: json.loads(path.read_text()) for name, path in paths if path.exists()}


def sections_of(page: str) -> dict[str, str]:
    """Split the page into the section of each benchmark, by name."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.rstrip("\n") + "\n" for part in parts}


def introduction() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"""# Benchmarks

> **Most people need this**
>
> - What a lost worker costs: [survival](#survival) (a plot over time), [recovery](#recovery) of
>   `ddp`, [strategy_recovery](#strategy_recovery) of the others.
> - What Shoal costs while nothing happens: [step_overhead](#step_overhead), [data](#data).
>   Whether weights stay exact: [exactness](#exactness).
> - Parameter servers: [parameters](#parameters), [faults](#faults),
>   [async_accuracy](#async_accuracy). GPUs: [gpu.md](gpu.md).

Written by `make report` from what `make bench NAME=...` measured. Each benchmark says at the head
of its file in `bench/` what it does and how it measures. Peers were measured on the same machine in
the same run. A figure of several runs is their median, if its name does not say `p99`.

Machine: {cores} cores ({platform.machine()}), {memory_gib():.0f} GiB of memory, no GPU. It was
shared with other work, so read ratios rather than times.
"""


def memory_gib() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2**30


def section(name: str, rows: Rows, measured_unix_s: float, *, plotted: bool) -> str:
    """Return a table of all figures, after the plot if there is one."""
    day = time.strftime("%Y-%m-%d", time.gmtime(measured_unix_s))
    parts = [f"## {name}\n", f"`make bench NAME={name}`, {day}.\n"]
    if plotted:
        parts.append(f"![{name}: Shoal beside others](benchmarks/{name}.svg)\n")
    parts += ["| figure | Shoal | unit | runs | other | value |", "|---|---|---|---|---|---|"]
    for row in rows:
        peer = row.get("peer_value")
        theirs = (row["peer"], f"{peer:.4g}") if peer is not None else ("", "")
        own = f"{row['value']:.4g}"
        parts.append(
            f"| {' | '.join([row['metric'], own, row['unit'], str(row['runs']), *theirs])} |"
        )
    return "\n".join([*parts, ""])


def gpu_section(ran: Mapping[str, Any]) -> str:
    """Section on the GPU run: device, versions, and the figures or the error of each case."""
    versions = {name.replace("_", " "): text for name, text in ran["versions"].items()}
    passed = sum(case["passed"] for case in ran["cases"])
    parts = [
        "## gpu\n",
        f"`make gpu-test` ([what the cases are](gpu.md)), {ran['day']}: {passed} of"
        f" {len(ran['cases'])} cases passed. The machine: {versions.pop('gpus', 'no GPU')};"
        f" {', '.join(f'{name} {text}' for name, text in versions.items())};"
        f" backend {ran['machine']['backend']}.\n",
        "| case | passed | seconds | figures |",
        "|---|---|---|---|",
    ]
    for case in ran["cases"]:
        figures = ", ".join(
            f"{name} {cell_text(value)}" for name, value in case.get("figures", {}).items()
        )
        fault = case.get("error", "").strip().splitlines()[-1:]
        cells = (f"{case['name']}: {case['title']}", "yes" if case["passed"] else "no")
        shown = "; ".join([*filter(None, [figures]), *fault]).replace("|", "\\|")
        parts.append(f"| {' | '.join(cells)} | {case['seconds']:g} | {shown} |")
    return "\n".join([*parts, ""])


def plot(rows: Rows) -> str:
    """Two bars for each figure."""
    return bars(
        {
            row["metric"]: [
                Bar(label=name, value=row[key], unit=row["unit"], is_own=key == "value")
                for name, key in (("Shoal", "value"), (row["peer"], "peer_value"))
            ]
            for row in rows
        }
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    main()
