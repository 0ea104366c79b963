"""Losses of training while the coordinator or etcd is down: pace, steps, members, samples.

    make bench NAME=outage
    .venv/bin/python bench/outage.py 600 etcd     # seconds; one or more of OUTAGES, in turn

Real processes on one machine at default settings: etcd, a coordinator, two parameter servers, and
two workers each under `ddp` and under `async-sgd`. A process is killed (SIGKILL), and restarted at
its address after 120 s. `both`: etcd is killed first, the coordinator after half of the outage, and
etcd is restarted first. `crash-loop`: the coordinator is killed 3 s after each start, for the whole
outage. Figures per outage:

`outage_*_steps_lost`: steps of `ddp` that a worker repeated or left out, and changes of generation.
`outage_*_members_lost`: members of both jobs that coordinators removed, and launchers that ended.
`outage_*_samples_repeated`: batches of `async-sgd` that were trained on more than once, in samples.
`outage_*_pace_*`: steps a second during the outage, over steps a second before it. The slower half
of the outage counts; the first tenth of the outage is left out.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rows import Row, publish

from shoal_client.local.etcd import RunningEtcd, start_etcd, start_members
from shoal_client.local.process import ChildCommand, Process, Supervisor

AWAY_S = 120.0
BEFORE_S = 15.0
"""Seconds of training before an outage: members have filled their reserves of samples by then."""
START_S, BACK_S = 120.0, 60.0
STEPS_TO_START = 50
POLL_S = 0.2
CRASHES_AFTER_S = 3.0
STRATEGIES = ("ddp", "async-sgd")
OUTAGES = ("coordinator", "etcd", "both", "crash-loop")
NUM_SERVERS, NUM_WORKERS = 2, 2
BATCH = 16
SCRIPT = Path(__file__).parent / "training" / "on_outage.py"


@dataclass(frozen=True)
class Step:
    """A step that a worker committed."""

    at_s: float
    generation: int
    step: int
    epoch: int
    first: int


def await_true(holds: Callable[[], bool], what: str, log_path: Path, within_s: float) -> None:
    give_up_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > give_up_s:
            raise SystemExit(f"not within {within_s:g} s: {what}\n{log_path.read_text()[-2000:]}")
        time.sleep(POLL_S)


class Cluster:
    """The processes of the cluster, each restarted at its address."""

    def __init__(self, supervisor: Supervisor, directory: Path) -> None:
        self._supervisor = supervisor
        self.directory = directory
        (self.etcd,) = start_etcd(supervisor.spawn, directory / "etcd")
        self.address, self.http_url = "127.0.0.1:0", ""
        self.coordinator_log = directory / "coordinator.log"
        self.start_coordinator()
        for number in range(NUM_SERVERS):
            name = f"ps-{number}"
            self._spawn(
                name, "ps", "--etcd", self.etcd.endpoint, "--listen", "127.0.0.1:0", "--id", name
            )

    def start_coordinator(self) -> None:
        ready = self.directory / "coordinator.json"
        ready.unlink(missing_ok=True)
        self.coordinator = self._spawn(
            "coordinator",
            *("coordinator", "--etcd", self.etcd.endpoint, "--listen", self.address),
            *("--http", "127.0.0.1:0", "--ready-file", str(ready)),
        )
        await_true(ready.exists, "the coordinator serves", self.coordinator_log, START_S)
        addresses = json.loads(ready.read_text())
        self.address, self.http_url = addresses["grpc"], addresses["http"]

    def start_etcd(self) -> None:
        running: Sequence[RunningEtcd] = start_members(self._supervisor.spawn, [self.etcd.member])
        (self.etcd,) = running

    def run(self, strategy: str) -> Process:
        """Start the workers of a job, which has the strategy's name."""
        return self._spawn(
            f"run-{strategy}",
            *("run", "-n", str(NUM_WORKERS), "--job", strategy, "--coordinator", self.address),
            *(str(SCRIPT), str(self.directory), strategy),
        )

    def leads(self) -> bool:
        try:
            return httpx.get(self.http_url + "/readyz", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def _spawn(self, name: str, *arguments: str) -> Process:
        return self._supervisor.spawn(
            ChildCommand(
                name=name,
                arguments=(sys.executable, "-m", "shoal_client", *arguments),
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
                log_path=self.directory / f"{name}.log",
            )
        )

    def steps(self, strategy: str) -> list[list[Step]]:
        """Read the committed steps of each worker, in order."""
        return [
            [Step(*json.loads(line)) for line in path.read_text().split("\n")[:-1]]
            for path in sorted(self.directory.glob(f"{strategy}-*"))
        ]

    def await_steps(self, since_s: float, within_s: float) -> None:
        """Return once all workers have taken STEPS_TO_START steps after `since_s`."""
        for strategy in STRATEGIES:

            def done(strategy: str = strategy) -> bool:
                return all_train(self.steps(strategy), since_s)

            log_path = self.directory / f"run-{strategy}.log"
            await_true(done, f"{strategy} trains", log_path, within_s)


def all_train(logs: Sequence[Sequence[Step]], since_s: float) -> bool:
    """True if all workers have taken STEPS_TO_START steps after `since_s`. A worker that was
    replaced before takes none, and its log stays."""
    counts = [sum(step.at_s > since_s for step in log) for log in logs]
    return sum(count >= STEPS_TO_START for count in counts) >= NUM_WORKERS


def pace(logs: Sequence[Sequence[Step]], begin_s: float, end_s: float) -> float:
    """Steps a second of all workers together."""
    taken = sum(begin_s <= step.at_s < end_s for log in logs for step in log)
    return taken / (end_s - begin_s)


def steps_lost(logs: Sequence[Sequence[Step]], since_s: float) -> int:
    """Count the steps repeated or left out since `since_s`; a change of generation adds one. A log
    without a step since then is of a worker that was replaced before."""
    lost = 0
    for log in logs:
        kept = [step for step in log if step.at_s >= since_s]
        if not kept:
            continue
        numbers = {step.step for step in kept}
        lost += len(kept) - len(numbers) + kept[-1].step - kept[0].step + 1 - len(numbers)
        lost += len({step.generation for step in kept}) - 1
    return lost


def samples_repeated(logs: Sequence[Sequence[Step]]) -> int:
    counts = Counter((step.epoch, step.first) for log in logs for step in log)
    return BATCH * sum(number - 1 for number in counts.values())


def strike(cluster: Cluster, what: str, away_s: float) -> None:
    """Kill the processes of an outage of `away_s`, and return at its end, before their restart."""
    until_s = time.monotonic() + away_s
    if what in ("etcd", "both"):
        cluster.etcd.process.kill()
        cluster.etcd.process.wait()
    if what == "both":
        time.sleep(away_s / 2)
    while what != "etcd":
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        if what != "crash-loop" or time.monotonic() >= until_s:
            break
        cluster.start_coordinator()
        time.sleep(CRASHES_AFTER_S)
    time.sleep(max(0.0, until_s - time.monotonic()))


def outage(cluster: Cluster, what: str, away_s: float, runs: Sequence[Process]) -> list[Row]:
    """Cause one outage, and return its figures."""
    began_s = time.monotonic()
    cluster.await_steps(began_s, START_S)
    time.sleep(BEFORE_S)
    removed = cluster.coordinator_log.read_text().count("member_removed")
    repeated = samples_repeated(cluster.steps("async-sgd"))
    struck_s = time.monotonic()
    strike(cluster, what, away_s)
    back_s = time.monotonic()
    if what in ("etcd", "both"):
        cluster.start_etcd()
    if what != "etcd":
        cluster.start_coordinator()
    await_true(cluster.leads, "a coordinator leads again", cluster.coordinator_log, BACK_S)
    cluster.await_steps(time.monotonic(), BACK_S)
    time.sleep(BEFORE_S)  # so that members that fell silent have been declared lost
    lost = cluster.coordinator_log.read_text().count("member_removed") - removed
    lost += sum(run.exit_code is not None for run in runs)
    logs = {strategy: cluster.steps(strategy) for strategy in STRATEGIES}
    kind = what.replace("-", "_")
    skipped_s = away_s / 10
    middle_s = (struck_s + back_s) / 2
    rows = [
        Row(
            metric=f"outage_{kind}_steps_lost",
            value=steps_lost(logs["ddp"], began_s),
            unit="steps",
            runs=1,
        ),
        Row(metric=f"outage_{kind}_members_lost", value=lost, unit="members", runs=1),
        Row(
            metric=f"outage_{kind}_samples_repeated",
            value=samples_repeated(logs["async-sgd"]) - repeated,
            unit="samples",
            runs=1,
        ),
    ]
    for strategy, steps in logs.items():
        before = pace(steps, struck_s - BEFORE_S, struck_s)
        halves = ((struck_s + skipped_s, middle_s), (middle_s, back_s))
        during = min(pace(steps, *half) for half in halves)
        print(f"{what} away, {strategy}: {before:.1f} steps/s before, {during:.1f} during")
        name = strategy.partition("-")[0]
        rows.append(
            Row(metric=f"outage_{kind}_pace_{name}", value=during / before, unit="ratio", runs=1)
        )
    return rows


def main() -> None:
    away_s = float(sys.argv[1]) if len(sys.argv) > 1 else AWAY_S
    what = sys.argv[2:] or OUTAGES
    if unknown := set(what) - set(OUTAGES):
        raise SystemExit(f"outages: seen {sorted(unknown)}, expected some of {OUTAGES}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, Supervisor(grace_s=2.0) as supervisor:
        cluster = Cluster(supervisor, Path(name))
        runs = [cluster.run(strategy) for strategy in STRATEGIES]
        for each in what:
            rows += outage(cluster, each, away_s, runs)
            print(*(f"{row.metric}: {row.value:.4g}" for row in rows[-5:]), sep=", ", flush=True)
    publish("outage", rows)


if __name__ == "__main__":
    main()
