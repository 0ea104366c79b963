"""Search for descendants of this process that are left over."""

import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents die. Not for libraries: this process then
    has to reap them, as `sweep` does."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants() -> dict[int, str]:
    """Pids and command lines of all live descendants of this process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            if fields[0] not in "ZX":
                parents[int(entry.name)] = int(fields[1])
    found: dict[int, str] = {}
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.update((pid, _command_line(pid)) for pid in frontier)
    return found


def sweep(grace_s: float) -> dict[int, str]:
    """Wait up to `grace_s` for the last descendants to end; kill and return the others. Reaps all
    children: no other code may wait for one.
    """
    deadline_s = time.monotonic() + grace_s
    while (left := descendants()) and time.monotonic() < deadline_s:
        _reap()
        time.sleep(0.01)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended meanwhile
    _reap()
    return left


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
