"""Programs as their authors write them end with the same weights with Shoal and three kills."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMPAT = Path(__file__).parents[2] / "bench" / "compat.py"
PROGRAMS = sorted(path.stem for path in (COMPAT.parent / "compat_programs" / "plain").glob("*.py"))
MOST_LINES = 12
LIMIT_S = 900


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.long if name == "ema" else pytest.mark.nightly)
        for name in PROGRAMS
    ],
)
def test_a_program_trains_to_the_same_weights_through_kills(program: str) -> None:
    done = subprocess.run(
        [sys.executable, str(COMPAT), program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.search(rf"{program}: .*: exact, (\d+) lines changed", done.stdout)
    assert summary and int(summary[1]) <= MOST_LINES, done.stdout


def test_the_suite_has_twenty_programs() -> None:
    assert len(PROGRAMS) == 20
