"""Files of runs in wandb's format."""

import os
import time
from pathlib import Path

import pytest

from shoal.tracking import weights_and_biases


def test_files_that_are_newer_than_the_clock_count_as_written_once_they_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock may have been set back, or a file server's clock may be ahead."""
    monkeypatch.setattr(weights_and_biases, "SETTLED_S", 0.05)
    file = tmp_path / "run-1.wandb"
    file.touch()
    os.utime(file, (time.time() + 3600,) * 2)
    assert weights_and_biases._settled(tmp_path) == [file]
