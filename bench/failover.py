"""Leader failover: time without a leader after the leading coordinator is killed, and lost steps.

    make bench NAME=failover
    .venv/bin/python bench/failover.py 20     # kills instead of the default

Real processes on one machine at default settings: etcd, three coordinators, `shoal run` with four
DDP workers. The leader gets a SIGKILL, and is started again at its address once the figure
is taken. `leader_failover_p50` and `_p99`: time from the SIGKILL until another replica leads, all
members attend it, and a call that needs the leader is answered. `leader_failover_steps_lost`: steps
that any worker repeated or left out over all kills. A change of the generation ends the bench.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rows import Row, publish, spread

from shoal_client.local.etcd import start_etcd
from shoal_client.local.process import ChildCommand, Process, Supervisor

NUM_KILLS = 5
NUM_REPLICAS, NUM_WORKERS = 3, 4
START_S, FAILOVER_S = 120.0, 60.0
STEPS_BETWEEN = 50
POLL_S = 0.01
JOB = "failover"
SCRIPT = Path(__file__).parent / "training" / "on_failover.py"


class Replica:
    """A coordinator process; another `start` restarts it at the same gRPC address."""

    def __init__(self, supervisor: Supervisor, directory: Path, name: str, etcd: str) -> None:
        self._supervisor = supervisor
        self._ready_path = directory / f"{name}.json"
        self._log_path = directory / f"{name}.log"
        self._name, self._etcd = name, etcd
        self.grpc, self.http = "127.0.0.1:0", ""
        self._client = httpx.Client(trust_env=False, timeout=5.0)
        self.start()

    def start(self) -> None:
        self._ready_path.unlink(missing_ok=True)
        arguments = (
            *(sys.executable, "-m", "shoal_client", "coordinator", "--etcd", self._etcd),
            *("--listen", self.grpc, "--http", "127.0.0.1:0"),
            *("--ready-file", str(self._ready_path)),
        )
        command = ChildCommand(name=self._name, arguments=arguments, log_path=self._log_path)
        self.process: Process = self._supervisor.spawn(command)
        await_true(self._ready_path.exists, f"{self._name} serves", self._log_path)
        addresses = json.loads(self._ready_path.read_text())
        self.grpc, self.http = addresses["grpc"], addresses["http"]

    def get(self, path: str) -> httpx.Response | None:
        """The answer; None if the coordinator does not answer."""
        try:
            return self._client.get(self.http + path)
        except httpx.HTTPError:
            return None

    def leads(self) -> bool:
        answer = self.get("/readyz")
        return answer is not None and answer.status_code == 200

    def attending(self) -> int:
        """The running generation, if all its members attend this coordinator; else 0."""
        answer = self.get(f"/api/v1/jobs/{JOB}")
        if answer is None or answer.status_code != 200:
            return 0
        job = answer.json()
        states = [member["member"]["state"] for member in job["members"]]
        complete = len(states) == NUM_WORKERS and "disconnected" not in states
        # A new leader shows the generation as running once every member has reported to it.
        complete = complete and job["summary"]["phase"] == "running"
        return int(job["summary"]["generation"]) if complete else 0


def await_true(
    holds: Callable[[], bool], what: str, log_path: Path | None = None, within_s: float = START_S
) -> None:
    give_up_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > give_up_s:
            log = log_path.read_text()[-2000:] if log_path else ""
            raise SystemExit(f"not within {within_s:g} s: {what}\n{log}")
        time.sleep(POLL_S)


@contextmanager
def training(directory: Path, coordinators: str) -> Iterator[None]:
    """Four workers of one job, until the end of the block."""
    with Supervisor(grace_s=2.0) as supervisor:
        supervisor.spawn(
            ChildCommand(
                name="launcher",
                arguments=(
                    *(sys.executable, "-m", "shoal_client", "run", "-n", str(NUM_WORKERS)),
                    *("--job", JOB, "--coordinator", coordinators),
                    *("--desired", str(NUM_WORKERS), "--max", str(NUM_WORKERS)),
                    *(str(SCRIPT), str(directory)),
                ),
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
                log_path=directory / "launcher.log",
            )
        )
        yield


def numbers(directory: Path) -> list[list[tuple[int, int]]]:
    """(generation, step) of each step that each worker committed, in order."""
    return [
        [tuple(json.loads(line)) for line in path.read_text().split("\n")[:-1]]
        for path in directory.glob("numbers-*")
    ]


def await_steps(directory: Path) -> None:
    """Return once each worker has committed STEPS_BETWEEN more steps."""
    base = {path: len(path.read_bytes().splitlines()) for path in directory.glob("numbers-*")}

    def done() -> bool:
        paths = list(directory.glob("numbers-*"))
        counts = [len(path.read_bytes().splitlines()) - base.get(path, 0) for path in paths]
        return len(counts) >= NUM_WORKERS and min(counts) >= STEPS_BETWEEN

    await_true(done, "workers train", directory / "launcher.log")


def fail_over(replicas: list[Replica]) -> float:
    """Kill the leader, and restart it once another coordinator leads all members. Returns the
    seconds from the kill until then."""
    leader = next(replica for replica in replicas if replica.leads())
    others = [replica for replica in replicas if replica is not leader]
    generation = leader.attending()
    struck_s = time.monotonic()
    leader.process.kill()
    await_true(
        lambda: any(replica.attending() for replica in others), "a successor", None, FAILOVER_S
    )
    took_s = time.monotonic() - struck_s
    newest = max(replica.attending() for replica in others)
    if newest != generation:
        raise SystemExit(f"generation {generation} became {newest}")
    leader.process.wait()
    leader.start()
    return took_s


def steps_lost(directory: Path) -> int:
    """Number of steps that workers repeated or left out. Exits if there was a second generation."""
    logs = numbers(directory)
    generations = {generation for log in logs for generation, _ in log}
    if len(logs) != NUM_WORKERS or len(generations) != 1:
        raise SystemExit(f"{len(logs)} workers trained in the generations {generations}")
    lost = 0
    for log in logs:
        steps = [step for _, step in log]
        lost += len(steps) - len(set(steps))
        lost += steps[-1] - steps[0] + 1 - len(set(steps))
    return lost


def main() -> None:
    num_kills = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS
    taken_s: list[float] = []
    with tempfile.TemporaryDirectory() as name, Supervisor(grace_s=2.0) as supervisor:
        directory = Path(name)
        (etcd,) = start_etcd(supervisor.spawn, directory / "etcd")
        replicas = [
            Replica(supervisor, directory, f"coordinator-{number}", etcd.endpoint)
            for number in range(NUM_REPLICAS)
        ]
        with training(directory, ",".join(replica.grpc for replica in replicas)):
            for _ in range(num_kills):
                await_steps(directory)
                taken_s.append(fail_over(replicas))
                print(f"leader killed: {taken_s[-1]:.3f} s", flush=True)
            await_steps(directory)
            lost = steps_lost(directory)
    publish(
        "failover",
        [
            *spread("leader_failover", taken_s, "s"),
            Row(metric="leader_failover_steps_lost", value=lost, unit="steps", runs=num_kills),
        ],
    )


if __name__ == "__main__":
    main()
