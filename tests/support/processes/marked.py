"""Processes that tests find again by an environment variable, however they were started."""

import os
import secrets
import signal
import time
from pathlib import Path

VARIABLE = "SHOAL_TEST_MARK"


class Mark:
    """A value of the variable that no other process has."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)

    @property
    def environment(self) -> dict[str, str]:
        """The variable, for the environment of a process to be found again."""
        return {VARIABLE: self._value}

    def processes(self) -> dict[int, str]:
        """Living processes with the mark: pid and command line."""
        found = {}
        mark = f"{VARIABLE}={self._value}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                marked = mark in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # ended meanwhile, or belongs to another user
            if marked and state not in "ZX":
                found[int(entry.name)] = command.strip()
        return found

    def await_none(self, within_s: float) -> dict[int, str]:
        """Wait until no process is left, at most `within_s`; return those that still run."""
        deadline_s = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return left

    def kill(self, within_s: float = 5.0) -> dict[int, str]:
        """Kill the processes that still run after `within_s`, and return them."""
        left = self.await_none(within_s)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended meanwhile
        return left
