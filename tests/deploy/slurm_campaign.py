"""Runs deploy/slurm/shoal.sbatch under a real Slurm, with the events that jobs meet there.

    make slurm-test                          # installs Debian's slurm-wlm first; needs root
    make slurm-test SLURM="--only lost"      # one case
    make slurm-test SLURM="--keep DIRECTORY" # keeps logs of the jobs there

Prints a line for each case, and a table at the end; the exit code is 1 if a case failed. Each case
submits a job of the same script to a cluster of three nodes (`slurm_nodes.py`), waits until it
trains, causes its event, and compares steps, exit code and remaining processes and files.
"""

import argparse
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.campaign import awaited, run_campaign, running
from deploy.slurm_nodes import SlurmNodes

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "shoal.sbatch"
TRAINED_S = 120.0
"""Time for a job to start and train; the machine may be busy."""
ENDED_S = 240.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
LAST_STEP = 399
NUM_SAMPLES = 2400
"""Samples of all epochs."""
TRAINING = """
import pathlib, socket, sys, time
import shoal, torch

strategy, pause_s = sys.argv[1], float(sys.argv[2])
here = pathlib.Path.cwd()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = (torch.randn(240, 8), torch.randn(240, 2))
keeps = None if strategy == "async-sgd" else shoal.Checkpoints(here / "kept", every_steps=100_000)
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy=strategy, checkpoints=keeps)
    for batch in session.batches(data, global_batch_size=6, epochs=10):
        with session.step() as step:
            session.forward_backward(batch, torch.nn.functional.mse_loss)
        with open(here / "steps", "a") as steps:
            host, world = socket.gethostname(), session.world_size
            figures = (batch.step, world, step.committed, len(batch.inputs))
            print(session.member_id, host, *figures, file=steps)
        if not (here / "finish").exists():
            time.sleep(pause_s)
    state = session.state_dict()
    if session.is_first:
        torch.save(state, here / "trained.pt")
"""


@dataclass(frozen=True)
class Step:
    """A line of the training script: a step that a member has taken."""

    member: str
    host: str
    number: int
    world_size: int
    committed: bool
    num_samples: int


@dataclass
class Case:
    """A job, in a folder of its own on the shared disk."""

    nodes: SlurmNodes
    name: str
    strategy: str = "ddp"
    pause_s: float = 0.1
    """Time of each step. There are 400."""
    job_id: str = ""
    facts: dict[str, object] = field(default_factory=dict)
    folders_before: dict[str, set[str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.nodes.shared / self.name

    @property
    def output(self) -> str:
        """Output of the batch script in all attempts."""
        return "".join(path.read_text() for path in self.folder.glob("slurm-*.out"))

    def clean_up(self) -> None:
        self.nodes.end_jobs()

    def _own_folders(self, node: str) -> set[str]:
        """Names of Shoal's folders in the node's /tmp, but those that may stay."""
        found = (path.name for path in (self.nodes.root / node / "tmp").glob("shoal-*"))
        return {each for each in found if not each.startswith(("shoal-logs-", "shoal-clusters-"))}

    def submit(self, num_nodes: int, *options: str, **variables: str) -> None:
        # The folder of a launcher that an earlier case killed is removed after a minute.
        self.folders_before = {name: self._own_folders(name) for name in self.nodes.names}
        self.folder.mkdir()
        (self.folder / "train.py").write_text(TRAINING)
        self.job_id = self.nodes.submit(
            f"--nodes={num_nodes}",
            *options,
            str(SCRIPT),
            *("train.py", self.strategy, str(self.pause_s)),
            cwd=self.folder,
            **({"PARAMETER_SERVERS": "0"} | variables),
        )

    def steps(self, name: str = "steps") -> list[Step]:
        path = self.folder / name
        lines = path.read_text().splitlines() if path.exists() else []
        parts = [line.split() for line in lines if line.count(" ") == 5]
        return [
            Step(member, host, int(number), int(world), committed == "True", int(num_samples))
            for member, host, number, world, committed, num_samples in parts
        ]

    def await_steps(self, num_members: int, after: int = -1, num_steps: int = 10) -> int:
        """Wait until `num_members` members have committed `num_steps` steps beyond step `after`.
        Return the number of the last one."""

        def taken() -> list[int]:
            assert self.state not in ENDED, f"{self.state}: {self.output}"
            steps = [s for s in self.steps() if s.committed and s.number > after]
            numbers = sorted({s.number for s in steps if s.world_size == num_members})
            return numbers if len(numbers) >= num_steps else []

        return awaited(taken, TRAINED_S, f"{num_members} members that train")[-1]

    @property
    def state(self) -> str:
        return self.nodes.job(self.job_id)["JobState"]

    def finish(self) -> None:
        """Let the training take its last steps at once."""
        (self.folder / "finish").touch()

    def await_restart(self, within_s: float = 90.0) -> int:
        """Wait until the job is in the queue again, and have it start soon: Slurm would wait for
        two minutes, but a node refuses a job that starts in the second of its requeue. Return the
        last step that was committed before."""
        awaited(lambda: int(self.nodes.job(self.job_id)["Restarts"]) > 0, within_s, "a requeue")
        awaited(lambda: self.state == "PENDING", within_s, "a pending job")
        # Slurm would attribute reports of processes of the last attempt to the next one.
        self.await_no_process()
        last = max(step.number for step in self.steps() if step.committed)
        (self.folder / "steps").rename(self.folder / "steps-before")
        self.nodes.run("scontrol", "update", f"JobId={self.job_id}", "StartTime=now+3")
        return last

    def check_resumed(self, last: int) -> None:
        """Check that training continued after the last step of the attempt before."""
        first = min(step.number for step in self.steps())
        self.facts["steps lost"] = last + 1 - first
        assert first == last + 1, f"the last step was {last}, and the first one after it {first}"

    def check_samples(self) -> None:
        """Check that asynchronous members, each of which counts its own steps, have trained on all
        samples of all epochs in both attempts together."""
        steps = [*self.steps("steps-before"), *self.steps()]
        trained = sum(step.num_samples for step in steps if step.committed)
        self.facts["samples trained twice"] = trained - NUM_SAMPLES
        assert trained >= NUM_SAMPLES, f"{NUM_SAMPLES - trained} samples were not trained on"
        again = sum(step.num_samples for step in self.steps())
        assert again < NUM_SAMPLES, "the second attempt began with the first sample"

    def check_end(self, lost: Sequence[str] = ()) -> None:
        """Wait for the end of the job; check exit code, steps, and what it leaves on nodes that
        were not `lost`."""
        fields = self.nodes.await_end(self.job_id, ENDED_S)
        self.facts["exit code"] = fields["ExitCode"]
        assert fields["ExitCode"] == "0:0", f"{fields['JobState']}: {self.output}"
        steps = self.steps()
        if self.strategy != "async-sgd":
            assert max(step.number for step in steps) == LAST_STEP, steps[-1]
        trained = self.folder / "trained.pt"
        kept = [path for path in (self.folder / "kept").glob("*") if path.is_dir()]
        for path in (trained, *kept):
            assert path.stat().st_mode & stat.S_IRGRP, f"the group cannot read {path}"
        left = self.folder / f"shoal-{self.job_id}"
        assert [path.name for path in left.iterdir()] == ["logs"], list(left.iterdir())
        self.await_no_process()
        for name in (each for each in self.nodes.names if each not in lost):
            own = sorted(self._own_folders(name) - self.folders_before[name])
            assert not own, f"{name} has {own} in its /tmp"

    def await_no_process(self) -> None:
        """Wait until no node has a process but its slurmd."""
        for name in self.nodes.names:
            awaited(lambda name=name: not self.nodes.processes(name), 60.0, f"no process on {name}")


def clean(case: Case) -> None:
    """A job of two nodes trains to its end: the exit code is 0, and only logs are left."""
    case.submit(2)
    case.await_steps(2)
    folder = case.folder / f"shoal-{case.job_id}"
    assert not list(folder.rglob("*etcd*.snap")) and not (folder / "etcd").exists()
    assert any("etcd" in line for line in case.nodes.processes("node1").values())
    for path in folder.rglob("*.key"):
        assert path.stat().st_mode & 0o077 == 0, f"others can read {path}"
    assert list(folder.rglob("*.key")), "no certificates"
    case.finish()
    case.check_end()


def counts(case: Case) -> None:
    """Nodes have different numbers of workers: two on the first one, one on the second."""
    case.submit(2, WORKERS_PER_NODE="2,1")
    case.await_steps(3)
    hosts = {(step.host, step.member) for step in case.steps()}
    case.facts["workers"] = ",".join(
        str(sum(host == name for host, _ in hosts)) for name in ("node1", "node2")
    )
    assert case.facts["workers"] == "2,1", hosts
    case.finish()
    case.check_end()


def lost(case: Case) -> None:
    """A node is lost with its slurmd: the others continue to train, and the exit code is 0."""
    case.submit(3)
    last = case.await_steps(3)
    case.nodes.lose("node3")
    try:
        after = case.await_steps(2, after=last)
        numbers = sorted({step.number for step in case.steps() if step.committed})
        assert numbers == list(range(after + 1)), "a step is missing"
        case.facts["steps lost"] = 0
        case.finish()
        case.check_end(lost=["node3"])
    finally:
        case.nodes.revive("node3")


def killed(case: Case) -> None:
    """A launcher is killed: the other node continues to train, and the exit code is 0."""
    case.submit(2)
    last = case.await_steps(2)
    found = [p for p, line in case.nodes.processes("node2").items() if " run " in line]
    case.nodes.kill("node2", found)
    case.await_steps(1, after=last)
    case.finish()
    case.check_end(lost=["node2"])


def notice(case: Case) -> None:
    """SIGTERM to the step, as before a preemption: members drain, the job is requeued and
    continues."""
    case.submit(2)
    case.await_steps(2)
    began_s = time.monotonic()
    case.nodes.run("scancel", "--signal=TERM", case.job_id)
    last = case.await_restart()
    case.facts["seconds"] = round(time.monotonic() - began_s, 1)
    case.await_steps(2, after=last)
    case.check_resumed(last)
    case.finish()
    case.check_end()


def requeue(case: Case) -> None:
    """`scontrol requeue` sends SIGTERM to all processes, etcd and coordinator included, 30 s before
    SIGKILL. Members drain, and the job continues from its last step."""
    case.submit(2)
    case.await_steps(2)
    began_s = time.monotonic()
    case.nodes.run("scontrol", "requeue", case.job_id)
    last = case.await_restart()
    case.facts["seconds"] = round(time.monotonic() - began_s, 1)
    case.await_steps(2, after=last)
    case.check_resumed(last)
    case.finish()
    case.check_end()


def time_limit(case: Case) -> None:
    """The time limit comes, with a notice of 60 s: the job requeues itself and continues."""
    case.pause_s = 0.5  # the training must not end before the notice
    case.submit(2, "--time=2", "--signal=TERM@60")
    case.await_steps(2)
    last = case.await_restart(within_s=150.0)
    case.await_steps(2, after=last)
    case.check_resumed(last)
    case.finish()
    case.check_end()


def servers(case: Case) -> None:
    """`scontrol requeue` of an asynchronous job: it continues from a snapshot of its servers."""
    case.strategy = "async-sgd"
    case.submit(2, PARAMETER_SERVERS="2")
    case.await_steps(2)
    case.nodes.run("scontrol", "requeue", case.job_id)
    case.await_restart()
    case.await_steps(2)
    case.finish()
    case.check_end()
    case.check_samples()


def cancel(case: Case) -> None:
    """`scancel`: the members drain, the job is not requeued, and its checkpoint exists."""
    case.submit(2)
    case.await_steps(2)
    case.nodes.run("scancel", case.job_id)
    fields = case.nodes.await_end(case.job_id, ENDED_S)
    assert fields["JobState"] == "CANCELLED", fields
    last = max(step.number for step in case.steps() if step.committed)
    kept = [path.name for path in (case.folder / "kept").iterdir()]
    assert kept == [f"step-{last + 1:08d}"], f"the last step was {last}: {kept}"
    case.facts["steps lost"] = 0


CASES = (clean, counts, killed, lost, notice, requeue, cancel, time_limit, servers)


@contextmanager
def begin(options: argparse.Namespace) -> Iterator[Callable[[str], Case]]:
    with running(SlurmNodes(3)) as nodes:
        print(f"{nodes.version}, {len(nodes.names)} nodes", flush=True)
        yield partial(Case, nodes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make slurm-test")
    sys.exit(run_campaign(parser, CASES, sys.argv[1:], begin))
