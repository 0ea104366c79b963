"""`shoal up --hosts` and `shoal down`, with an `ssh` on PATH that runs its command on this
machine. The hosts have addresses of their own on loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
from deploy.slurm_campaign import TRAINING

from shoal_client.cli import main
from shoal_client.local.directory import locked
from shoal_client.remote.control_plane import RECORD, ControlPlaneHosts, recorded
from shoal_client.remote.on_host import PID, PLAN, HostOrder, host_directory, start
from shoal_client.remote.ssh import MARK
from shoal_proto.errors import InvalidSpec

DEADLINE_S = 300.0
SSH = """#!/bin/sh
# Takes `ssh OPTION... -- HOST COMMAND`; there is no host "gone", nor one that the file $GONE names.
echo "$*" >> "$SSH_LOG"
while [ "$1" != -- ]; do shift; done
if [ "$2" = gone ] || grep -qsx "$2" "$GONE"; then
    echo "ssh: connect to host $2 port 22: No route to host" >&2
    exit 255
fi
case $2 in a) last=11 ;; b) last=12 ;; c) last=13 ;; esac
export SSH_CONNECTION="127.0.0.1 50000 127.0.0.$last 22"
exec sh -c "$3"
"""


class Shoal:
    """Calls of `shoal` with a user's settings."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **variables: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal_client", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self._environment, **variables},
            cwd=self._folder,
        )
        self.started.append(process)
        return process

    def __call__(self, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*words, **variables)
        output, errors = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)


@pytest.fixture
def shoal(tmp_path: Path) -> Iterator[Shoal]:
    """Calls of `shoal`; all that they have started is ended."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    environment = {name: v for name, v in os.environ.items() if not name.startswith("SHOAL_")}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SSH_LOG": str(tmp_path / "ssh.log"),
        "GONE": str(tmp_path / "gone"),
        "HOME": str(tmp_path),
    }

    calls = Shoal(tmp_path, environment)
    yield calls
    for process in calls.started:
        process.kill()
        process.communicate()
    (tmp_path / "gone").unlink(missing_ok=True)
    for path in tmp_path.glob("plane/hosts/*/pid"):
        calls("down", "--dir", "plane", "--hosts", path.parent.name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hosts", "a,b"), "saw 2: a, b; expected 1, 3 or 5 hosts. etcd serves as long as"),
        (("--hosts", "a,b,c,d"), "saw 4: a, b, c, d; expected 1, 3 or 5 hosts"),
        (("--hosts", "a,b,b"), "a host is given twice; saw b"),
        (("--hosts", "a,b:4,c"), "bad host; saw 'b:4'"),
        (("--hosts=-oProxyCommand=x",), "bad host; saw '-oProxyCommand=x'"),
        (("--hosts", "a,b,$(reboot)"), "bad host; saw '$(reboot)'"),
        (("--hosts", "a", "--insecure"), "--insecure cannot be used with --hosts"),
        (("--hosts", "a", "--etcd", "x:1"), "--etcd cannot be used with --hosts"),
        (("--hosts", "a", "--port", "65533"), "bad --port; saw 65533"),
        (("--host-python", "x"), "--host-python is for --hosts"),
    ],
)
def test_bad_hosts_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    """The error is one line, with exit code 2."""
    assert main(["up", *options]) == 2
    errors = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


def test_a_host_that_is_not_reached_is_named_and_nothing_starts(
    shoal: Shoal, tmp_path: Path
) -> None:
    ended = shoal("up", "--hosts", "a,gone,c", "--dir", "plane")
    assert ended.returncode == 1
    assert "a host of the control plane cannot be used: gone;" in ended.stderr
    assert "ssh: connect to host gone port 22: No route to host" in ended.stderr
    assert not (tmp_path / "plane" / "hosts").exists()
    assert recorded(str(tmp_path / "plane")) is None


def test_a_second_start_at_the_same_time_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    """It would replace the certificates of the first, and end its parts."""
    here = ControlPlaneHosts(names=(), directory=str(tmp_path / "plane")).here
    here.mkdir(parents=True)
    with locked(here):
        ended = shoal("up", "--hosts", "a", "--dir", "plane")
    assert ended.returncode == 1
    assert "another `shoal up --hosts` starts a control plane" in ended.stderr


def test_a_start_that_has_failed_ends_only_its_own_parts(tmp_path: Path) -> None:
    """Another machine's start was faster on this host."""
    order = HostOrder(action="stop", name="a", directory=str(tmp_path), plan={"etcd": ["own"]})
    directory = host_directory(order)
    directory.mkdir(parents=True)
    (directory / PLAN).write_text(json.dumps({"etcd": ["other's"]}))
    with locked(directory), subprocess.Popen(["sleep", "600"]) as others:
        (directory / PID).write_text(str(others.pid))
        command = [sys.executable, "-m", "shoal_client.remote.on_host"]
        given = json.dumps(asdict(order)) + "\n"
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
        assert others.poll() is None
        others.kill()
    assert json.loads(done.stdout.removeprefix(MARK))["runs"] is False
    assert (directory / PLAN).exists()


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """Another user could replace the keys in it."""
    tmp_path.chmod(0o777)
    order = HostOrder(action="start", name="a", directory=str(tmp_path))
    with pytest.raises(InvalidSpec, match="other users can write"):
        start(host_directory(order), order)


def test_down_without_a_record_asks_for_hosts(shoal: Shoal) -> None:
    ended = shoal("down")
    assert ended.returncode == 1
    assert "no control plane was started from this machine" in ended.stderr


def test_data_of_a_control_plane_that_was_cut_off_is_not_removed(
    shoal: Shoal, tmp_path: Path
) -> None:
    """All hosts have lost power. Only `shoal down` removes what the cluster knows of its jobs."""
    order = HostOrder(action="start", name="a", directory=str(tmp_path / "plane"))
    plan = host_directory(order) / PLAN
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    ended = shoal("up", "--hosts", "a", "--dir", "plane")
    assert ended.returncode == 1
    assert "there is data of a control plane that no longer runs" in ended.stderr
    assert plan.exists()
    assert shoal("down", "--hosts", "a", "--dir", "plane").returncode == 0
    assert not plan.exists()


def test_localhost_is_the_machine_that_started_the_control_plane(
    shoal: Shoal, tmp_path: Path
) -> None:
    """Machines that share a home directory share the record."""
    record = ControlPlaneHosts(names=(), directory=str(tmp_path / "plane")).here / RECORD
    record.parent.mkdir(parents=True)
    known = ControlPlaneHosts(
        names=["localhost"], directory=str(tmp_path / "plane"), machine="login1"
    )
    record.write_text(json.dumps(asdict(known)))
    for words in (("down",), ("up", "--hosts", "localhost")):
        ended = shoal(*words, "--dir", "plane")
        assert ended.returncode == 1
        assert "saw started on login1, and this is " in ended.stderr
    assert recorded(str(tmp_path / "plane")) == known
    assert shoal("down", "--dir", "plane", "--hosts", "localhost").returncode == 0
    assert not record.exists()


def test_a_damaged_record_is_overcome_by_naming_the_hosts(shoal: Shoal, tmp_path: Path) -> None:
    """The error of `shoal down` without hosts gives this advice."""
    record = ControlPlaneHosts(names=(), directory=str(tmp_path / "plane")).here / RECORD
    record.parent.mkdir(parents=True)
    record.touch()
    ended = shoal("down", "--dir", "plane")
    assert ended.returncode == 1
    assert "Give the hosts: shoal down --hosts" in ended.stderr
    ended = shoal("down", "--dir", "plane", "--hosts", "a")
    assert (ended.returncode, ended.stdout) == (0, "a: nothing ran\n"), ended.stderr
    assert not record.exists()


@pytest.mark.long
def test_a_control_plane_outlives_a_host(shoal: Shoal, tmp_path: Path) -> None:
    """Each host has an etcd member and a coordinator, and a share of the servers, which outlive the
    command. After the loss of a host the others serve on, and a job trains to its end. `shoal down`
    ends all that it reaches."""
    up = shoal("up", "--hosts", "a,b,c", "--ps", "2", "--dir", "plane")
    assert up.returncode == 0, up.stderr
    coordinators = exported(up.stdout, "SHOAL_COORDINATOR")
    access = {
        "SHOAL_COORDINATOR": coordinators,
        "SHOAL_TLS": exported(up.stdout, "SHOAL_TLS"),
    }
    hosts = [each.partition(":")[0] for each in coordinators.split(",")]
    assert hosts == ["127.0.0.11", "127.0.0.12", "127.0.0.13"]
    for name in "abc":
        folder = tmp_path / "plane" / "hosts" / name
        assert not [*folder.rglob("ca.key")], "the authority's key is never copied"
        assert folder.stat().st_mode & 0o777 == 0o700
    assert "BEGIN" not in (tmp_path / "ssh.log").read_text(), "other users see command lines"
    assert shoal("status", **access).returncode == 0

    again = shoal("up", "--hosts", "a,b,c", "--dir", "plane")
    assert again.returncode == 1
    assert "a control plane is up; saw its parts on a, b, c" in again.stderr

    (tmp_path / "train.py").write_text(TRAINING)
    job = shoal.start("run", "-n", "2", "--job", "first", "train.py", "ddp", "0.1", **access)
    steps = tmp_path / "steps"
    await_lines(steps, 20)
    lost = int((tmp_path / "plane" / "hosts" / "a" / "pid").read_text())
    os.kill(lost, signal.SIGKILL)
    await_refused(coordinators.partition(",")[0])
    (tmp_path / "gone").write_text("a\n")
    await_lines(steps, len(steps.read_text().splitlines()) + 20)
    status = shoal("status", "--job", "first", **access)
    assert status.returncode == 0, status.stderr
    (tmp_path / "finish").touch()
    output, _ = job.communicate(timeout=DEADLINE_S)
    assert job.returncode == 0, output

    down = shoal("down", "--dir", "plane")
    assert down.returncode == 1
    assert "a was not stopped, its parts may still run: ssh: connect to host a" in down.stdout
    assert "b: stopped" in down.stdout
    assert "c: stopped" in down.stdout
    for address in coordinators.split(",")[1:]:
        await_refused(address)
    left = recorded(str(tmp_path / "plane"))
    assert left is not None
    assert left.names == ["a"]

    (tmp_path / "gone").unlink()
    down = shoal("down", "--dir", "plane")
    assert down.returncode == 0
    assert "a: nothing ran" in down.stdout
    kept = [path for path in tmp_path.rglob("plane/hosts/**/*") if path.is_file()]
    assert {path.suffix for path in kept} <= {".log", ""}
    assert not ControlPlaneHosts(names=(), directory=str(tmp_path / "plane")).certificates.exists()


@pytest.mark.long
def test_a_start_that_fails_leaves_nothing(shoal: Shoal, tmp_path: Path) -> None:
    """Coordinators listen on all addresses: on one machine, only one can have a given port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    up = shoal("up", "--hosts", "a,b,c", "--ps", "0", "--port", str(port), "--dir", "plane")
    assert up.returncode == 1
    assert "a host of the control plane cannot start" in up.stderr
    assert "removing what was started" in up.stderr
    assert not [*tmp_path.glob("plane/hosts/*/pid")]
    assert recorded(str(tmp_path / "plane")) is None
    for last in (11, 12, 13):
        await_refused(f"127.0.0.{last}:{port}")


def exported(output: str, variable: str) -> str:
    return output.partition(f"export {variable}=")[2].partition("\n")[0]


def await_lines(path: Path, number: int) -> None:
    """Wait until the file has so many lines."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert time.monotonic() < deadline_s, f"fewer than {number} lines in {path}"
        time.sleep(0.05)


def await_refused(address: str) -> None:
    """Wait until nothing listens at the address."""
    host, _, port = address.partition(":")
    deadline_s = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except ConnectionRefusedError:
            return
        assert time.monotonic() < deadline_s, f"{address} is still served"
        time.sleep(0.05)
