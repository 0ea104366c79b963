"""A run fails if a process that runs tests ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
OPTIONS = ["-q", "-n", "1", "--max-worker-restart", "0", "-p", "no:cacheprovider"]


@pytest.mark.parametrize(("body", "expected"), [("os._exit(3)", 3), ("assert False", 1)])
def test_the_exit_code_differs_for_an_ended_process_and_a_failed_test(
    tmp_path: Path, body: str, expected: int
) -> None:
    """CI runs failed tests again; it would miss a test that was never run."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_it.py").write_text(f"import os\n\n\ndef test_it():\n    {body}\n")
    outer = {name for name in os.environ if name.startswith(("PYTEST_", "SHOAL_TESTS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "test_it.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in outer},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stdout
    assert ("not all tests were run" in done.stdout) == (expected == 3)
