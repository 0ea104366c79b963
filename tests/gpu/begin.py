"""Runs a case in this process once a line arrives on stdin: begin.py NAME SETTINGS.json. Until then
it imports what the case needs, while the case before it runs."""

import sys
from multiprocessing import forkserver
from pathlib import Path

from support.processes.forking import forked  # noqa: F401 - what the server is to import


def main() -> None:
    # Start it first: the server imports in parallel to this process.
    forkserver.ensure_running()
    from gpu.case import run  # noqa: PLC0415

    if sys.stdin.readline():
        run(sys.argv[1], Path(sys.argv[2]))


# Members import the module that started them, and must not run this.
if __name__ == "__main__":
    main()
