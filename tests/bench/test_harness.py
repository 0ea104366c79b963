"""The harness that compares systems; the longer test runs it on real processes for some seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.nightly
def test_a_replay_measures_each_system() -> None:
    """Run a trace in which machines are lost and replaced: every system ends with the weights of
    one process."""
    systems = ["one-process", "shoal-ddp", "shoal-fsdp", "torchrun"]
    ran = subprocess.run(
        [
            *(sys.executable, str(BENCH / "trace.py"), "--systems", ",".join(systems)),
            *("--mtbf", "10", "--seed", "3", "--max", "3", "--seconds", "20"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = [line.split("│") for line in ran.stdout.splitlines() if "│" in line]
    distances = {row[1].strip(): float(row[-2]) for row in rows if row[1].strip() in systems}
    assert sorted(distances) == sorted(systems), ran.stdout
    assert all(distance <= 1e-5 for distance in distances.values()), distances


def test_an_interpreter_that_does_not_exist_has_no_torchft(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchft is then left out, with a message."""
    import recovery  # noqa: PLC0415 - bench/ is on the path of a test only

    monkeypatch.setattr(recovery, "TORCHFT_PYTHON", str(tmp_path / "python"))
    assert not recovery.has_torchft()
