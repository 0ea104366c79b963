"""Part `failover` of bench/weights.py: time without a new version after the loss of a member.

Two members of a job on two launchers publish after each step. Of kind `member`, only the process of
a member is killed, which its launcher reports. Of kind `host`, its launcher is killed too, as if
their host were lost. Killed processes are restarted. `weights_failover_KIND`: time from the kill
until a reader sees a version of the next generation. `_detection`: time until the coordinator
removes the member. `_after_detection`: the difference of the two. The part fails if the version
numbered just before the first one of the new generation is neither of the generation of the kill
nor missing.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

RATE = 2.0**-10
WIDTH = 1 << 16
PAUSE_S = 0.05
"""Pause after each step."""
JOB = "failover"
SERIES = f"{JOB}/policy"
VISIBLE_S = 120.0
KINDS = ("member", "host")


def train(directory: Path) -> None:
    """Train as a member: publish after each step, and write the process id to a file."""
    import shoal  # noqa: PLC0415

    model = torch.nn.Linear(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with shoal.join() as session:
        model, optimizer = session.distribute(model, optimizer, strategy="ddp")
        series = session.series("policy", keep=16)
        for batch in session.batches(torch.ones(16_000, 8), global_batch_size=16, epochs=1_000_000):
            with session.step() as step:
                session.backward(model(batch.inputs).sum() / len(batch.inputs))
            if step.committed:
                series.publish()
                me = directory / f"{os.getppid()}.member"
                me.write_text(f"{os.getpid()} {session.world_size}")
                time.sleep(PAUSE_S)


class Job:
    """Two launchers, each with a member."""

    def __init__(self, supervisor: Any, directory: Path, coordinator: str) -> None:
        self._supervisor = supervisor
        self._directory = directory
        self._coordinator = coordinator
        self.launchers = [self._launched(), self._launched()]

    def _launched(self) -> Any:
        from shoal_client.local.process import ChildCommand  # noqa: PLC0415

        options = {"--job": JOB, "-n": 1, "--desired": 2, "--max": 2, "--max-restarts": 1000}
        command = ChildCommand(
            name="launcher",
            arguments=(
                *(sys.executable, "-m", "shoal_client", "run", "--coordinator", self._coordinator),
                *(str(part) for option in options.items() for part in option),
                *(__file__, str(self._directory)),
            ),
            environment={**os.environ, "OMP_NUM_THREADS": "1"},
            log_path=self._directory / "launchers.log",
        )
        return self._supervisor.spawn(command)

    def member_of(self, launcher: Any) -> int:
        """Return the process id of the launcher's member once both members train."""
        since_s = time.time()
        while True:
            path = self._directory / f"{launcher.pid}.member"
            if path.exists() and path.stat().st_mtime > since_s:
                pid, _, world_size = path.read_text().partition(" ")
                if world_size == "2":
                    return int(pid)
            time.sleep(0.02)

    def kill(self, kind: str) -> float:
        """Kill the member of the second launcher, and for "host" the launcher too; return the time
        of the kill."""
        launcher = self.launchers[1]
        pid = self.member_of(launcher)
        at_s = time.time()
        if kind == "host":
            launcher.send_signal(signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        return at_s

    def restore(self) -> None:
        """Restart the second launcher if it was killed."""
        if self.launchers[1].wait(0.0) is not None:
            self.launchers[1] = self._launched()


def failover(job: Job, series: Any, http_url: str, kind: str) -> tuple[float, float]:
    """Return the seconds from a kill until the member is removed, and until a version of the next
    generation is visible."""
    killed_s = job.kill(kind)
    before = series.newest()
    last = before
    while True:
        version = series.wait(last.number, timeout=VISIBLE_S)
        if version.epoch > before.epoch:
            visible_s = time.time()
            break
        last = version
    numbers = {each.number: each.epoch for each in series.versions()}
    first = min(n for n, epoch in numbers.items() if epoch == version.epoch)
    assert numbers.get(first - 1, before.epoch) == before.epoch, numbers
    events = httpx.get(
        f"{http_url}/api/v1/jobs/{JOB}/events", params={"limit": 1000}, trust_env=False
    )
    removed_s = min(
        each["unix_s"]
        for each in events.raise_for_status().json()["events"]
        if each["kind"] == "member_removed" and each["unix_s"] >= killed_s
    )
    return removed_s - killed_s, visible_s - killed_s


def failovers(limit: Any, rounds: int) -> Iterator[Any]:
    from rows import spread  # noqa: PLC0415

    import shoal  # noqa: PLC0415
    from shoal_client.local.cluster import LocalCluster, LocalClusterConfig  # noqa: PLC0415
    from shoal_client.local.process import Supervisor  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = LocalClusterConfig(directory=directory / "cluster", num_parameter_servers=2)
        with LocalCluster(config) as cluster, Supervisor(grace_s=2.0) as supervisor:
            job = Job(supervisor, directory, cluster.coordinator)
            took: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
            with shoal.subscribe(SERIES, coordinator=cluster.coordinator) as series:
                series.wait(timeout=VISIBLE_S)
                for number in limit.rounds(rounds):
                    for kind, times in took.items():
                        found = failover(job, series, cluster.http_url, kind)
                        job.restore()
                        if number > 1:
                            times.append(found)
    for kind, times in took.items():
        yield from spread(f"weights_failover_{kind}_detection", [a for a, _ in times], "s")
        yield from spread(f"weights_failover_{kind}", [b for _, b in times], "s")
        after = [b - a for a, b in times]
        yield from spread(f"weights_failover_{kind}_after_detection", after, "s")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
