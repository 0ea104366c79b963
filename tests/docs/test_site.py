"""`make docs`: the site is built without a warning, references included."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.docs.pages import ROOT

import shoal


@pytest.mark.long
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """A broken link, a page outside the navigation or a missing name gives a warning, and
    `--strict` makes it fail."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "reference" / "api.html").read_text()
    assert [name for name in shoal.__all__ if f"shoal.{name}" not in api] == []
    assert "shoal.join" in api and "SHOAL_COORDINATOR" in api
    commands = (tmp_path / "reference" / "commands.html").read_text()
    assert "--max-restarts" in commands and "--memory-limit-bytes" in commands
    settings = (tmp_path / "reference" / "configuration.html").read_text()
    assert "SHOAL_CHECK_PEERS" in settings and "bring_up_s" in settings
