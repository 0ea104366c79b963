"""Files of runs in wandb's format."""

import os
import time
from pathlib import Path

import pytest

from shoal.tracking import weights_and_biases
from shoal.tracking.tracker import Run, WriteProgress
from shoal.tracking.weights_and_biases import WandB


def test_a_job_whose_name_ends_in_that_of_another_has_runs_of_its_own(tmp_path: Path) -> None:
    """Regression: job `digits` took the newer run of job `big-digits` for its own."""
    wandb = WandB("project", directory=tmp_path, mode="offline")
    for job, begun_unix_s, step in (("digits", 1000.0, 3), ("big-digits", 2000.0, 100)):
        opened = wandb.open(Run(job=job, begun_unix_s=begun_unix_s))
        opened.write(step, {"loss": 1.0}, begun_unix_s)
        opened.close()
    again = wandb.open(Run(job="digits", begun_unix_s=None))
    assert again.written == WriteProgress(step=3, names=frozenset({"loss"}))
    again.close()
    assert len(list((tmp_path / "wandb").glob(".shoal-*.jsonl"))) == 2


def test_files_that_are_newer_than_the_clock_count_as_written_once_they_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may have been set back, or a file server's clock may be ahead."""
    monkeypatch.setattr(weights_and_biases, "SETTLED_S", 0.05)
    file = tmp_path / "run-1.wandb"
    file.touch()
    os.utime(file, (time.time() + 3600,) * 2)
    assert weights_and_biases._settled(tmp_path) == [file]
