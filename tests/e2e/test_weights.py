"""Versions that a job publishes, and readers outside it, while each part is killed in turn."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from support.processes.commands import ANY_PORTS, Shoal, finish, part_pids, read_until
from support.weights.published_counts import publishing_script, reading_script

SERIES = "rl/policy"
INSTALLED = re.compile(r"installed (\d+) (\d+) (\w+) (True|False)")


def worker_pids(command: Shoal) -> list[int]:
    lines = command.processes().items()
    return sorted(pid for pid, line in lines if "train.py" in line and " run " not in line)


class Readers:
    """Reading processes, and their output so far."""

    def __init__(self, command: Shoal, cluster: dict[str, str], names: Sequence[str]) -> None:
        self.processes = {
            name: command.start_python("read.py", SERIES, name, environment=cluster)
            for name in names
        }
        self.said: dict[str, list[str]] = {name: [] for name in names}

    def await_more(self, count: int = 3) -> None:
        """Return once each reader has installed so many further versions."""
        for name, process in self.processes.items():
            self.said[name] += read_until(process, "installed", count)

    def finish(self) -> dict[str, list[tuple[int, int, str]]]:
        """Number, step and digest of each version that a reader installed, by reader; all were
        whole."""
        found = {}
        for name, process in self.processes.items():
            code, output = finish(process, self.said[name])
            assert code == 0, output
            installed = INSTALLED.findall(output)
            assert {whole for *_, whole in installed} == {"True"}, output
            found[name] = [
                (int(number), int(step), digest) for number, step, digest, _ in installed
            ]
        return found


def check_orders(installed: dict[str, list[tuple[int, int, str]]]) -> None:
    """Versions rise at each reader, and one number has the same content for all readers. Steps may
    fall once, when members went back to their copies of a lost member's state."""
    for versions in installed.values():
        numbers = [number for number, *_ in versions]
        assert numbers == sorted(set(numbers))
        steps = [step for _, step, _ in versions]
        assert sum(after < before for before, after in pairwise(steps)) <= 1
    contents: dict[int, set[tuple[int, str]]] = {}
    for versions in installed.values():
        for number, step, digest in versions:
            contents.setdefault(number, set()).add((step, digest))
    assert {number for number, each in contents.items() if len(each) > 1} == set()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_versions_continue_while_each_part_is_killed(
    shoal_command: Shoal, tmp_path: Path, strategy: str
) -> None:
    """A worker, a server and the coordinator are killed. Readers never see half a version and never
    go back; one that starts late reads the last version after the trainer has ended."""
    (tmp_path / "train.py").write_text(publishing_script(1000, 100))
    (tmp_path / "read.py").write_text(reading_script())
    up = shoal_command.start("up", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    welcome = read_until(up, "Ctrl-C stops the cluster")
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))
    cluster = {"SHOAL_COORDINATOR": coordinator, "OMP_NUM_THREADS": "1"}
    run = shoal_command.start(
        "run", "-n", "2", "--job", "rl", "train.py", strategy, environment=cluster
    )
    readers = Readers(shoal_command, cluster, ["first", "second"])
    readers.await_more()
    os.kill(worker_pids(shoal_command)[-1], signal.SIGKILL)
    readers.await_more()
    for part in ("ps-0", "coordinator"):
        os.kill(part_pids(shoal_command)[part], signal.SIGKILL)
        read_until(up, f"shoal up: {part} serves again")
        readers.await_more()
    (tmp_path / "done").touch()
    code, output = finish(run)
    assert code == 0, output
    [ended] = set(re.findall(r"ended at version (\d+) of step (\d+)", output))
    late = Readers(shoal_command, cluster, ["late"])
    installed = {**readers.finish(), **late.finish()}
    check_orders(installed)
    assert {each[-1][:2] for each in installed.values()} == {tuple(map(int, ended))}
    stop(up)
    assert shoal_command.await_none(5.0) == {}


@pytest.mark.long
def test_numbers_continue_when_a_job_starts_over(shoal_command: Shoal, tmp_path: Path) -> None:
    """The launcher is killed with its workers. The job starts over with step 1, and a reader that
    has installed versions of the first run continues with those of the second."""
    (tmp_path / "train.py").write_text(publishing_script(1000, 100))
    (tmp_path / "read.py").write_text(reading_script())
    up = shoal_command.start("up", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    welcome = read_until(up, "Ctrl-C stops the cluster")
    coordinator = next(line.split()[-1] for line in welcome if line.startswith("coordinator"))
    cluster = {"SHOAL_COORDINATOR": coordinator, "OMP_NUM_THREADS": "1"}
    run = shoal_command.start(
        "run", "-n", "2", "--job", "rl", "train.py", "ddp", environment=cluster
    )
    readers = Readers(shoal_command, cluster, ["first"])
    readers.await_more(5)
    run.kill()
    run.wait()
    command = ("run", "-n", "2", "--job", "rl", "--fresh", "train.py", "ddp")
    again = run_once_free(shoal_command, command, cluster)
    readers.await_more(3)
    (tmp_path / "done").touch()
    code, output = finish(again)
    assert code == 0, output
    [versions] = readers.finish().values()
    numbers, steps = [each[0] for each in versions], [each[1] for each in versions]
    assert numbers == sorted(set(numbers))
    assert steps != sorted(steps), "the second run did not start over"
    stop(up)
    assert shoal_command.await_none(5.0) == {}


def run_once_free(
    command: Shoal, arguments: Sequence[str], cluster: dict[str, str]
) -> "subprocess.Popen[str]":
    """Start the job over as soon as its killed members count as lost."""
    while True:
        run = command.start(*arguments, environment=cluster)
        try:
            run.wait(5)
        except subprocess.TimeoutExpired:
            return run
        _, output = finish(run)
        assert "JobInUse" in output or "has members" in output, output


def stop(up: "subprocess.Popen[str]") -> None:
    assert up.poll() is None
    up.send_signal(signal.SIGINT)
    code, output = finish(up)
    assert code == 0, output
