"""The harness that compares systems; the longer test runs it on real processes for some seconds."""

import json
import subprocess
import sys
from argparse import ArgumentParser
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


def test_a_record_replaces_the_entry_of_the_same_options_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import rows  # noqa: PLC0415 - bench/ is on the path of a test only
    from training.changes import KEYS as keys  # noqa: N811, PLC0415
    from training.changes import add_arguments, described  # noqa: PLC0415

    monkeypatch.setattr(rows, "OF_RECORD", tmp_path)
    parser = ArgumentParser()
    add_arguments(parser)
    for number, options in enumerate(["", "", "--notice 5", "--max 2", "--seed 2"]):
        asked = parser.parse_args(["--mtbf", "10", *options.split()])
        entry = {**described(asked), "system": "torchrun", "number": number}
        path = rows.record("trace", [entry], keys=keys)
    assert [entry["number"] for entry in json.loads(path.read_text())] == [1, 2, 3, 4]
