"""Runs `shoal run --hosts` and `shoal up --hosts` over real sshds, with the events that hosts and
jobs meet there.

    make ssh-test                          # installs Debian's OpenSSH first; needs root
    make ssh-test SSH="--only lost"        # one case
    make ssh-test SSH="--keep DIRECTORY"   # keeps the output of the jobs there

Prints a line for each case, and a table at the end; the exit code is 1 if a case failed. The hosts
are network namespaces of this machine (`ssh_hosts.py`).
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.campaign import awaited, run_campaign, running
from deploy.slurm_campaign import LAST_STEP, TRAINING
from deploy.ssh_hosts import HEAD, SshHosts

TRAINED_S = 150.0
"""Time for a job to start and train; the machine may be busy."""
ENDED_S = 120.0
LOST_S = 90.0
SILENT = "gone"


@dataclass
class Case:
    """A job, in a folder of its own on the shared disk."""

    hosts: SshHosts
    name: str
    run: "subprocess.Popen[bytes] | None" = None
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.hosts.root / self.name

    @property
    def output(self) -> str:
        """The command's output so far."""
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def clean_up(self) -> None:
        print(self.output[-4000:], file=sys.stderr)
        if self.run is not None:
            self.run.kill()

    def shoal(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a `shoal` command on the user's machine."""
        return self.hosts.run(HEAD, sys.executable, "-m", "shoal_client", *words, within_s=300)

    def start(
        self, hosts: str, *options: str, strategy: str = "ddp", before: Sequence[str] = ()
    ) -> None:
        self.folder.mkdir()
        (self.folder / "train.py").write_text(TRAINING)
        words = ("--hosts", hosts, *options, "--job", self.name, "train.py", strategy, "0.1")
        self.run = self.hosts.popen(
            HEAD,
            (*before, sys.executable, "-m", "shoal_client", "run", *words),
            self.folder,
            self.folder / "output",
        )

    def await_steps(self, num_members: int, after: int = -1, num_steps: int = 10) -> int:
        """Wait for so many steps beyond `after` with so many members; return the last one."""

        def taken() -> list[int]:
            assert self.run is not None and self.run.poll() is None, self.output
            found = self.steps(num_members)
            numbers = sorted(number for number in found if number > after)
            return numbers if len(numbers) >= num_steps else []

        return awaited(taken, TRAINED_S, f"{num_members} members that train")[-1]

    def steps(self, num_members: int) -> set[int]:
        """The numbers of the steps that so many members have committed."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        parts = [line.split() for line in lines if line.count(" ") == 5]
        return {int(n) for _, _, n, w, c, _ in parts if int(w) == num_members and c == "True"}

    def members(self) -> dict[str, str]:
        """The host of each member that has trained."""
        lines = (self.folder / "steps").read_text().splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def finish(self) -> None:
        """Let the training take its last steps at once."""
        (self.folder / "finish").touch()

    def await_end(self, within_s: float = ENDED_S) -> int:
        """Wait for the end of the command; return its exit code."""
        assert self.run is not None
        return self.run.wait(within_s)

    def check_nothing_left(self) -> None:
        """Check that no process and no key is left on a host."""
        self.hosts.await_quiet(self.hosts.names, 60)
        for name in self.hosts.names:
            left = [each for each in self.hosts.temporary_files(name) if "shoal-run" in each]
            assert not left, f"{left} in /tmp of {name}"


def clean(case: Case) -> None:
    """Three workers on two hosts train to the end; a silent host is left out."""
    case.start(f"a,b:2,{SILENT}", "--ps", "0")
    case.await_steps(3)
    keys = [
        path for name in "ab" for path in (case.hosts.root / name / "tmp").glob("shoal-run-*/certs")
    ]
    assert len(keys) == 2, keys
    for folder in keys:
        assert sorted(each.name for each in folder.iterdir()) == [
            "ca.crt",
            "worker.crt",
            "worker.key",
        ]
        assert folder.stat().st_mode & 0o777 == 0o700
    case.finish()
    code = case.await_end()
    assert code == 0, f"{code}: {case.output}"
    assert f"{SILENT} is left out: ssh: connect to host {SILENT} port 22" in case.output
    assert "health_report_failed" not in case.output
    assert max(case.steps(3)) == LAST_STEP
    assert sorted(case.members().values()) == ["a", "b", "b"]
    lines = case.output.splitlines()
    assert any(line.startswith("b: shoal run: 2 of 2 workers completed") for line in lines)
    case.check_nothing_left()
    case.facts |= {"exit code": code, "members": 3}


def status(case: Case) -> None:
    """`shoal status` and `shoal stop` on the machine of the command reach the job."""
    case.start("a,b", "--ps", "0")
    case.await_steps(2)
    shown = case.hosts.run(HEAD, sys.executable, "-m", "shoal_client", "status", "--job", case.name)
    assert shown.returncode == 0, shown
    assert all(member in shown.stdout for member in case.members()), shown.stdout
    coordinator = case.output.partition("coordinator at ")[2].partition(",")[0]
    words = ("stop", case.name, "--coordinator", coordinator)
    stopped = case.hosts.run(HEAD, sys.executable, "-m", "shoal_client", *words)
    assert stopped.returncode == 0, stopped
    code = case.await_end()
    assert code == 143, f"{code}: {case.output}"
    case.check_nothing_left()
    case.facts |= {"exit code": code}


def lost(case: Case) -> None:
    """A host loses its network and its processes; the others train to the end."""
    case.start("a,b,c", "--ps", "0")
    before = case.await_steps(3)
    case.hosts.lose("c")
    began_s = time.monotonic()
    case.await_steps(2, after=before)
    case.facts["seconds to go on"] = round(time.monotonic() - began_s, 1)
    awaited(lambda: "c was lost" in case.output, LOST_S, "the report of the lost host")
    case.finish()
    code = case.await_end()
    assert code == 0, f"{code}: {case.output}"
    missing = set(range(LAST_STEP + 1)) - case.steps(3) - case.steps(2)
    assert not missing, f"steps that no member has committed: {missing}"
    case.hosts.await_quiet(("a", "b"), 60)
    case.facts |= {"exit code": code, "steps lost": 0}


def ctrl_c(case: Case) -> None:
    """Ctrl-C drains all workers, and the command ends with 130."""
    case.start("a,b", "--ps", "0")
    case.await_steps(2)
    assert case.run is not None
    case.run.send_signal(signal.SIGINT)
    code = case.await_end()
    assert code == 130, f"{code}: {case.output}"
    assert case.output.count("drained: ") == 2, case.output
    case.check_nothing_left()
    case.facts |= {"exit code": code}


def killed(case: Case) -> None:
    """Hosts keep no process and no file of the job after the command was killed."""
    case.start("a,b", "--ps", "0")
    case.await_steps(2)
    assert case.run is not None
    began_s = time.monotonic()
    case.run.kill()
    case.run.wait()
    case.check_nothing_left()
    case.hosts.await_quiet((HEAD,), 60)
    case.facts["seconds until all have ended"] = round(time.monotonic() - began_s, 1)


def servers(case: Case) -> None:
    """Workers on the hosts push to parameter servers on the machine of the command."""
    case.start("a,b", "--ps", "2", strategy="async-sgd")
    awaited((case.folder / "steps").exists, TRAINED_S, "a step")
    case.finish()
    code = case.await_end()
    assert code == 0, f"{code}: {case.output}"
    assert (case.folder / "trained.pt").exists()
    case.check_nothing_left()
    case.facts |= {"exit code": code}


def up(case: Case) -> None:
    """A job trains with a control plane on three hosts; one loses its processes, and the others go
    on. `shoal down` leaves no process."""
    shared = ("--dir", str(case.hosts.root / "plane"))
    started = case.shoal("up", "--hosts", "a,b,c", "--ps", "0", *shared)
    assert started.returncode == 0, started
    exported = [each for each in started.stdout.splitlines() if each.startswith("  export ")]
    values = dict(line.removeprefix("  export ").split("=", 1) for line in exported)
    coordinators = values["SHOAL_COORDINATOR"]
    tls = ("env", f"SHOAL_TLS={values['SHOAL_TLS']}")
    case.start("a,b", "--coordinator", coordinators, before=tls)
    before = case.await_steps(2)
    case.hosts.kill("c")
    began_s = time.monotonic()
    case.await_steps(2, after=before)
    case.facts["seconds to go on"] = round(time.monotonic() - began_s, 1)
    case.finish()
    code = case.await_end()
    assert code == 0, f"{code}: {case.output}"
    ended = case.shoal("down", *shared)
    assert ended.returncode == 0, ended
    assert "c: nothing ran" in ended.stdout, ended
    case.check_nothing_left()
    case.facts |= {"exit code": code}


# The last case loses a host, which stays lost.
CASES = (clean, status, ctrl_c, killed, servers, up, lost)


@contextmanager
def begin(options: argparse.Namespace) -> Iterator[Callable[[str], Case]]:
    with running(SshHosts(("a", "b", "c"), SILENT)) as hosts:
        print(f"{hosts.version}, {len(hosts.names)} hosts", flush=True)
        yield partial(Case, hosts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make ssh-test")
    sys.exit(run_campaign(parser, CASES, sys.argv[1:], begin))
