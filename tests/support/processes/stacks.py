"""Stacks of a process that did not answer a test in time, for the failure message of the test.

Python's own handler of the signal writes the stacks, so it also works if a thread keeps the
interpreter locked. Only the kernel knows threads that are not Python's (Gloo's).
"""

import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path

_ASK = signal.SIGUSR2
_WITHIN_S, _LOOK_S = 5.0, 0.05


class Stacks:
    """Stacks of one process, which must call `install` first of all."""

    def __init__(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="shoal-stacks-")
        os.close(descriptor)
        self._path = Path(path)

    def install(self) -> None:
        """Install, in the process, the handler that writes the stacks of all threads whenever `of`
        asks."""
        faulthandler.register(_ASK, file=self._path.open("w"), all_threads=True)

    def of(self, pid: int) -> str:
        """Return the current stacks of the process, and the kernel's state of its threads."""
        try:
            threads = [_thread(task) for task in Path(f"/proc/{pid}/task").iterdir()]
            os.kill(pid, _ASK)
        except (FileNotFoundError, ProcessLookupError):
            return "(it has ended by now)"
        return "\n".join([self._written() or "(it does not answer)", *sorted(threads)])

    def _written(self) -> str:
        """Wait until the file no longer grows, and return its text."""
        give_up_s, seen = time.monotonic() + _WITHIN_S, -1
        while time.monotonic() < give_up_s:
            size = self._path.stat().st_size
            if size and size == seen:
                break
            seen = size
            time.sleep(_LOOK_S)
        return self._path.read_text(errors="replace")

    def close(self) -> None:
        """Delete the file. May be called twice."""
        self._path.unlink(missing_ok=True)


def _thread(task: Path) -> str:
    """Describe a thread: name, state, and where in the kernel it waits."""
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        name, place = (task / "comm").read_text().strip(), (task / "wchan").read_text()
    except (OSError, IndexError):
        return f"  {task.name}: gone"
    return f"  {task.name} {name}: {state} {place}"
