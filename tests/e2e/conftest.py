"""Real commands as a user starts them, and a way to see every process they cause."""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

DEADLINE_S = 240.0
ANY_PORTS = ("--port", "0", "--http-port", "0")
"""For `shoal up`: its usual ones may be those of another test."""


class Shoal:
    """Starts `shoal` commands; whatever they start carries a mark in its environment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = f"SHOAL_TEST_MARK={secrets.token_hex(8)}"
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, typed: str = ""
    ) -> "subprocess.Popen[str]":
        """`shoal ARGUMENTS`, stdout and stderr in one pipe; `typed` is what it reads."""
        name, _, value = self._mark.partition("=")
        own = {key: text for key, text in os.environ.items() if not key.startswith("SHOAL_")}
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "shoal_client", *arguments],
            stdin=subprocess.PIPE if typed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._directory,
            env={**own, **(environment or {}), name: value, "COLUMNS": "200"},
        )
        self._started.append(process)
        if process.stdin is not None:
            process.stdin.write(typed)
            process.stdin.close()
            process.stdin = None
        return process

    def processes(self) -> dict[int, str]:
        """Every living process with the mark: pid and command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                marked = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # ended while we looked, or somebody else's
            if marked and state not in "ZX":
                found[int(entry.name)] = command.strip()
        return found

    def await_none(self, within_s: float) -> dict[int, str]:
        """What is still there after that time; empty as soon as nothing is."""
        deadline_s = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return left

    def end(self) -> None:
        """Kill what a failed test left."""
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for pid in self.await_none(5.0):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shoal_command(tmp_path: Path) -> Iterator[Shoal]:
    commands = Shoal(tmp_path)
    yield commands
    commands.end()


def read_until(process: "subprocess.Popen[str]", wanted: str, count: int = 1) -> list[str]:
    """Lines of output up to the `count`-th that holds `wanted`."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        count -= wanted in line
        if count == 0:
            return lines
    raise AssertionError(f"{wanted!r} did not come; the output was:\n" + "\n".join(lines))


def finish(process: "subprocess.Popen[str]", before: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and the whole output."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, "\n".join([*before, output])


def part_pids(command: Shoal) -> dict[str, int]:
    """The parts of `shoal up` that run, by name."""
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
    """Whether the job loses nothing with one server more; `url` is that of its shards."""
    try:
        answer = httpx.get(url, timeout=10.0, trust_env=False, verify=False)
    except httpx.HTTPError:
        return False
    if answer.status_code != 200:
        return False
    copies = [shard["replication"]["copies"] for shard in answer.json()["shards"]]
    return bool(copies) and all(any(not c["joining"] for c in each) for each in copies)
