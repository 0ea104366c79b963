"""Draws docs/demo.svg from a real run of `shoal demo`: .venv/bin/python docs/site/picture.py"""

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).parents[1] / "demo.svg"
COLUMNS = 84


def main() -> None:
    """Run the demo, and draw what it prints."""
    run = subprocess.run(
        [sys.executable, "-m", "shoal_client", "demo"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": str(COLUMNS)},
    )
    draw(run.stdout)
    print(f"written to {TARGET}")


def draw(printed: str) -> None:
    """Write a picture of a terminal, COLUMNS wide, that shows the text."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text("$ make demo", style="bold"))
    console.print(Text(printed.rstrip()))
    console.save_svg(str(TARGET), title="make demo")


if __name__ == "__main__":
    main()
