"""Commands started as a user starts them, and a way to see every process that they cause."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest
from support.processes.marked import Mark

DEADLINE_S = 240.0
ANY_PORTS = ("--port", "0", "--http-port", "0")
"""Options of `shoal up`: another test may use its default ports."""


class Shoal:
    """Starts `shoal` commands; all their processes carry a mark in the environment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = Mark()
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, typed: str = ""
    ) -> "subprocess.Popen[str]":
        """Start `shoal ARGUMENTS` with stdout and stderr in one pipe; `typed` is its stdin."""
        command = ("-m", "shoal_client", *arguments)
        return self.start_python(*command, environment=environment, typed=typed)

    def start_python(
        self, *arguments: str, environment: Mapping[str, str] | None = None, typed: str = ""
    ) -> "subprocess.Popen[str]":
        """Start `python ARGUMENTS` in the same way."""
        own = {key: text for key, text in os.environ.items() if not key.startswith("SHOAL_")}
        process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            stdin=subprocess.PIPE if typed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._directory,
            env={**own, **(environment or {}), **self._mark.environment, "COLUMNS": "200"},
        )
        self._started.append(process)
        if process.stdin is not None:
            process.stdin.write(typed)
            process.stdin.close()
            process.stdin = None
        return process

    def processes(self) -> dict[int, str]:
        """Pid and command line of each living process that these commands caused."""
        return self._mark.processes()

    def await_none(self, within_s: float) -> dict[int, str]:
        """Wait until none of these processes is left, and return those that are left after that
        time."""
        return self._mark.await_none(within_s)

    def end(self) -> None:
        """Kill the processes that a failed test left."""
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._mark.kill()


@pytest.fixture
def shoal_command(tmp_path: Path) -> Iterator[Shoal]:
    commands = Shoal(tmp_path)
    yield commands
    commands.end()


def read_until(process: "subprocess.Popen[str]", wanted: str, count: int = 1) -> list[str]:
    """Return lines of output up to the `count`-th that contains `wanted`."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        count -= wanted in line
        if count == 0:
            return lines
    raise AssertionError(f"{wanted!r} did not come; the output was:\n" + "\n".join(lines))


def finish(
    process: "subprocess.Popen[str]", before: Sequence[str] = (), *, within_s: float = DEADLINE_S
) -> tuple[int, str]:
    """Wait for the process' end; return its exit code and all its output."""
    output, _ = process.communicate(timeout=within_s)
    return process.returncode, "\n".join([*before, output])


def is_alive(pid: int) -> bool:
    """True if the process has not ended, and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def part_pids(command: Shoal) -> dict[str, int]:
    """Return the pids of the running parts of `shoal up`, by name."""
    found = {}
    for pid, line in command.processes().items():
        if " coordinator " in line:
            found["coordinator"] = pid
        elif server := re.search(r" --id (ps-\d)", line):
            found[server[1]] = pid
        elif "--data-dir" in line:
            found["etcd"] = pid
    return found


def every_shard_has_a_copy(url: str) -> bool:
    """True if the job loses nothing when one more server is lost; `url` is that of its shards."""
    try:
        answer = httpx.get(url, timeout=10.0, trust_env=False, verify=False)
    except httpx.HTTPError:
        return False
    if answer.status_code != 200:
        return False
    copies = [shard["replication"]["copies"] for shard in answer.json()["shards"]]
    return bool(copies) and all(any(not c["joining"] for c in each) for each in copies)
