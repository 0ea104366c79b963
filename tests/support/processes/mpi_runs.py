"""Start ranks under mpiexec, and read what each returned or raised."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MPIEXEC = Path(sys.executable).with_name("mpiexec")
RANK = Path(__file__).with_name("mpi_rank.py")
TESTS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """A job under mpiexec that is over."""

    code: int
    reports: dict[int, dict[str, Any]]
    """Reports by rank: "returned", or "raised" and "text"; a rank that was killed has none."""
    output: str


def run_under_mpiexec(world_size: int, body: str, *, timeout_s: float = 60.0) -> Ended:
    """Run a function of tests/, e.g. "support.collectives.mpi_training.report", on n ranks."""
    with tempfile.TemporaryDirectory() as directory:
        command = [MPIEXEC, "-n", str(world_size), sys.executable, RANK, directory, timeout_s, body]
        ended = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        reports = {
            int(path.name): json.loads(path.read_text()) for path in Path(directory).iterdir()
        }
        return Ended(ended.returncode, reports, ended.stdout)
