"""What the threads of a process do that a test waits for in vain: for the message of its failure.

Python's own handler of the signal writes the stacks, so that a process tells them too in which a
thread holds the interpreter and does not let go of it. Threads that are not Python's (Gloo's) are
known to the kernel alone.
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
    """Those of one process, which is to call `tell` first of all."""

    def __init__(self) -> None:
        descriptor, path = tempfile.mkstemp(prefix="shoal-stacks-")
        os.close(descriptor)
        self._path = Path(path)

    def tell(self) -> None:
        """In the process: write the stacks of all threads whenever `of` asks."""
        faulthandler.register(_ASK, file=self._path.open("w"), all_threads=True)

    def of(self, pid: int) -> str:
        """The stacks of the process, as they are now, and what the kernel knows of its threads."""
        try:
            threads = [_thread(task) for task in Path(f"/proc/{pid}/task").iterdir()]
            os.kill(pid, _ASK)
        except (FileNotFoundError, ProcessLookupError):
            return "(it has ended by now)"
        return "\n".join([self._written() or "(it does not answer)", *sorted(threads)])

    def _written(self) -> str:
        """What it has written once that grows no more."""
        give_up_s, seen = time.monotonic() + _WITHIN_S, -1
        while time.monotonic() < give_up_s:
            size = self._path.stat().st_size
            if size and size == seen:
                break
            seen = size
            time.sleep(_LOOK_S)
        return self._path.read_text(errors="replace")

    def close(self) -> None:
        """May be called twice."""
        self._path.unlink(missing_ok=True)


def _thread(task: Path) -> str:
    """Name, state, and where in the kernel it waits."""
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        name, place = (task / "comm").read_text().strip(), (task / "wchan").read_text()
    except (OSError, IndexError):
        return f"  {task.name}: gone"
    return f"  {task.name} {name}: {state} {place}"
