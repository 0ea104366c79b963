"""Scripts of the documentation, run in processes that have imported torch already."""

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path


def work(script: str, arguments: list[str], environment: Mapping[str, str], output: str) -> None:
    """Run a script as `shoal run` makes a worker do; its output is appended to a file."""
    os.chdir(Path(script).parent)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    with Path(output).open("a", buffering=1) as file:
        sys.stdout = file
        runpy.run_path(script, run_name="__main__")
