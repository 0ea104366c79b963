"""Figures of `shoal demo`, run several times: medians in bench/results/demo.json.

    make bench NAME=demo            # 3 runs
    .venv/bin/python bench/demo.py 5

`ddp_kill_recovery` is the time from the SIGKILL to the next completed step of the generation
without the killed worker. `async_kill_pause` is the longest gap between the survivors' steps in
the two seconds after the kill, minus the median gap in the two seconds before it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rows import Row, publish

DEFAULT_RUNS = 3


def run_demo(path: Path) -> dict[str, dict[str, Any]]:
    """The figures of one demo, by strategy."""
    command = [sys.executable, "-m", "shoal_client", "demo", "--json", str(path)]
    subprocess.run(command, check=True)
    return {row["strategy"]: row for row in json.loads(path.read_text())}


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_RUNS
    with tempfile.TemporaryDirectory() as directory:
        runs = [run_demo(Path(directory) / f"{index}.json") for index in range(num_runs)]

    def row(metric: str, strategy: str, key: str, unit: str) -> Row:
        value = median(run[strategy][key] for run in runs)
        return Row(metric=metric, value=value, unit=unit, runs=num_runs)

    publish(
        "demo",
        [
            row("ddp_kill_recovery", "ddp", "recovery_s", "s"),
            row("async_kill_pause", "async-sgd", "pause_s", "s"),
            row("async_samples_per_s", "async-sgd", "samples_per_s", "samples/s"),
            row("ddp_samples_per_s", "ddp", "samples_per_s", "samples/s"),
        ],
    )


if __name__ == "__main__":
    main()
