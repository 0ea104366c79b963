"""Training of the demo: `shoal run`, with a SIGKILL of one worker, and its outcome."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal_client.connection.http import direct_http_client
from shoal_client.demo.audit import (
    Sample,
    WorkerAudit,
    count_asynchronous,
    count_synchronous,
    generation_at,
    pause_s,
    read_account,
    recovery_s,
    span_s,
)
from shoal_client.demo.plan import DATASET_SIZE, DemoPlan, Outcome
from shoal_client.local.cluster import LocalCluster, last_lines
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_proto.errors import InternalError
from shoal_proto.tls.identity import without_tls

TICK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class LiveProgress:
    """Progress of a training."""

    samples: int
    steps: int
    workers: int
    """Worker processes that have completed a step, without the killed one."""
    killed: str
    """Empty before the kill."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The SIGKILL: its time and the killed worker."""

    account: str
    member_id: str
    at_s: float


class LiveTally:
    """Cheap counts from the growing audit files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._begun: dict[Path, dict[tuple[int, int], int]] = {}
        self.samples = 0
        self.committed: dict[Path, int] = {}

    def read(self) -> None:
        """Read the lines written since the last call."""
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._count_line(path, json.loads(line))

    def _count_line(self, path: Path, line: dict[str, object]) -> None:
        begun = self._begun.setdefault(path, {})
        key = (int(str(line["generation"])), int(str(line["step"])))
        if line["event"] == "begin":
            positions = line["positions"]
            assert isinstance(positions, list)
            begun[key] = len(positions)
        else:
            self.samples += begun.pop(key, 0)
            self.committed[path] = self.committed.get(path, 0) + 1


class DemoTraining:
    """Runs one plan on a cluster that is up."""

    def __init__(self, plan: DemoPlan, cluster: LocalCluster, directory: Path, data: Path) -> None:
        self._plan = plan
        self._cluster = cluster
        self._directory = directory
        self._data = data
        self._kill: Kill | None = None

    def run(self, show: Callable[[LiveProgress], None]) -> Outcome:
        """Train, kill a worker, wait for the end. Raises InternalError with the end of the log."""
        self._directory.mkdir(parents=True)
        with Supervisor(grace_s=3.0) as supervisor:
            process = supervisor.spawn(self._command())
            pushes = self._follow(process, show)
        if process.exit_code != 0:
            raise self._failure(f"`shoal run` ended with code {process.exit_code}")
        return self._outcome(pushes)

    def _command(self) -> ChildCommand:
        plan = self._plan
        environment = {**without_tls(os.environ), "SHOAL_COORDINATOR": self._cluster.coordinator}
        run = ("run", "-n", str(plan.num_workers), "--job", plan.job, "-m", "shoal.demo.digits")
        arguments = {
            "--strategy": plan.strategy,
            "--epochs": plan.epochs,
            "--global-batch": plan.global_batch,
            "--data": self._data,
            "--directory": self._directory,
        }
        flat = (str(each) for pair in arguments.items() for each in pair)
        return ChildCommand(
            name=plan.job,
            arguments=(sys.executable, "-P", "-m", "shoal_client", *run, *flat),
            environment=environment,
            log_path=self._log,
        )

    @property
    def _log(self) -> Path:
        return self._directory / "run.log"

    def _follow(self, process: Process, show: Callable[[LiveProgress], None]) -> int | None:
        tally = LiveTally(self._directory)
        deadline_s = time.monotonic() + self._plan.timeout_s
        pushes: int | None = None
        # The files send no event; the end of the run ends the wait.
        while process.wait(TICK_S) is None:
            tally.read()
            share = tally.samples / self._plan.num_samples
            if self._kill is None and share >= self._plan.kill_at:
                self._kill = self._kill_one(sorted(tally.committed))
            show(self._progress(tally))
            if self._cluster.failure_reason:
                raise self._failure(self._cluster.failure_reason)
            if time.monotonic() > deadline_s:
                raise self._failure(f"not done in {self._plan.timeout_s:.0f} s")
        tally.read()
        show(self._progress(tally))
        if not self._plan.synchronous:
            pushes = self._pushes_applied()
        return pushes

    def _progress(self, tally: LiveTally) -> LiveProgress:
        killed = self._kill
        return LiveProgress(
            samples=min(tally.samples, self._plan.num_samples),
            steps=max(tally.committed.values(), default=0)
            if self._plan.synchronous
            else sum(tally.committed.values()),
            workers=len(tally.committed) - (killed is not None),
            killed=killed.member_id if killed is not None else "",
        )

    def _kill_one(self, paths: Sequence[Path]) -> Kill:
        victim = paths[0]
        member_id, _, pid = victim.stem.rpartition(".")
        at_s = time.monotonic()
        os.kill(int(pid), signal.SIGKILL)
        return Kill(account=victim.stem, member_id=member_id, at_s=at_s)

    def _pushes_applied(self) -> int | None:
        url = f"{self._cluster.http_url}/api/v1/jobs/{self._plan.job}/shards"
        with direct_http_client(timeout_s=5.0) as client:
            shards = client.get(url).raise_for_status().json()["shards"]
        return max((shard["pushes"]["applied"] for shard in shards), default=None)

    def _outcome(self, pushes: int | None) -> Outcome:
        accounts = [read_account(path) for path in sorted(self._directory.glob("*.jsonl"))]
        expected: list[Sample] = [
            (epoch, position)
            for epoch in range(self._plan.epochs)
            for position in range(DATASET_SIZE)
        ]
        count = (
            count_synchronous(accounts, expected)
            if self._plan.synchronous
            else count_asynchronous(accounts, expected, pushes)
        )
        if self._kill is None:
            raise self._failure("the training ended before a worker could be killed")
        survivors, replacements = self._survivors_and_replacements(accounts, self._kill)
        generation = generation_at(accounts, self._kill.at_s) if self._plan.synchronous else None
        recovered_s = recovery_s(survivors, self._kill.at_s, after_generation=generation)
        if recovered_s is None:
            raise self._failure("no survivor completed a step after the kill")
        return Outcome(
            strategy=self._plan.strategy,
            test_accuracy=self._accuracy(),
            steps=count.steps,
            samples_per_s=count.samples / span_s(accounts),
            recovery_s=recovered_s,
            pause_s=pause_s(survivors, self._kill.at_s),
            samples_lost=count.lost,
            samples_repeated=count.repeated,
            replacement_steps=sum(len(each.commits) for each in replacements),
        )

    def _survivors_and_replacements(
        self, accounts: Sequence[WorkerAudit], kill: Kill
    ) -> tuple[list[WorkerAudit], list[WorkerAudit]]:
        others = [each for each in accounts if each.name != kill.account]
        survivors = [each for each in others if each.lines and each.lines[0].at_s < kill.at_s]
        return survivors, [each for each in others if each not in survivors]

    def _accuracy(self) -> float:
        results = [json.loads(path.read_text()) for path in self._directory.glob("*.result.json")]
        if not results:
            raise self._failure("no worker wrote a result")
        digests = {result["weights_sha256"] for result in results}
        if len(digests) > 1:
            raise self._failure(f"workers ended with {len(digests)} different sets of weights")
        return float(min(result["test_accuracy"] for result in results))

    def _failure(self, seen: str) -> InternalError:
        return InternalError(
            f"the {self._plan.strategy} training of the demo failed",
            seen=seen,
            fix=f"The end of its log, {self._log}:\n{last_lines(self._log)}",
        )
