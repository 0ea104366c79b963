"""The harness that compares systems; the longer test runs it on real processes for some seconds."""

import json
import math
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
import torch

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


def test_weights_that_are_no_numbers_have_no_distance() -> None:
    """A NaN in any of the weights shows in the distance, also after a weight without one."""
    import exactness  # noqa: PLC0415 - bench/ is on the path of a test only

    expected = {name: torch.zeros(2) for name in ("first", "second", "third")}
    assert exactness.difference({**expected, "second": torch.tensor([0.0, -3.0])}, expected) == 3.0
    broken = {**expected, "second": torch.tensor([0.0, math.nan])}
    assert math.isnan(exactness.difference(broken, expected))


def test_a_survivor_that_was_restarted_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the survivor would otherwise have the memory of a new process."""
    import long_run  # noqa: PLC0415 - bench/ is on the path of a test only

    pids = [1, 2]
    monkeypatch.setattr(long_run, "family", lambda machines, name: list(pids))
    monkeypatch.setattr(long_run, "usage_of", lambda pid: pid)
    machines, running = Mock(), Mock(services={"etcd": 9})
    run = long_run.KilledRun(machines, running, Random(1))
    run.sample()
    assert run.samples[0]["survivor"] == 2
    pids[1] = 3
    with pytest.raises(long_run.NotTraining, match="was restarted"):
        run.sample()


def test_torchrun_writes_into_the_folder_of_its_job_only(tmp_path: Path) -> None:
    """A killed agent does not remove its folder of logs, which is in /tmp by default."""
    from training.jobs import torchrun_agent  # noqa: PLC0415 - bench/ is on the path of a test only

    command = torchrun_agent(
        tmp_path, name="machine-0", port=1, max_nodes=1, conf="", script=("on_torchrun.py",)
    )
    assert f"--log-dir={tmp_path}" in command.arguments
