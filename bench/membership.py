"""Membership at scale: a real coordinator process on a real etcd, members over real gRPC.

    make bench NAME=membership           # 3 runs of the first figure
    .venv/bin/python bench/membership.py 5

`join_to_commit_1000`: time from the Propose call of the last of 1,000 members until all have the
committed record; the bench fails if records differ. `heartbeat_cpu_10000`: CPU cores that the
coordinator needs to keep 10,000 members on 1,250 hosts alive, each with an open stream, with one
heartbeat call per host and second. `member_cost_ratio_10000_to_100`: these cores per member, over
the cores per member with 100 members. `form_cost_ratio_10000_to_100`: CPU time per member of the
state machine alone, from attendance to the running generation, with 10,000 members over that with
100. Everything runs on this machine: coordinator, etcd and members share its cores.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rows import Row, publish

from shoal_client.local.etcd import start_etcd
from shoal_client.local.process import ChildCommand, Supervisor
from shoal_client.local.start_time import cpu_s
from shoal_proto.incarnation import new_incarnation
from shoal_server.coordinator.persistence import codec
from shoal_server.core.generations.roster import JobSpec, MemberInfo, Proposal
from shoal_server.core.job.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.phases import Phase

DEFAULT_RUNS = 3
NUM_DRIVERS = 2
HEARTBEAT_S = 1.0
ALIVE_S = 20.0
FEW_ALIVE_S = 60.0
"""Longer than ALIVE_S, since few members use little CPU time."""
DRIVER = Path(__file__).with_name("member_driver.py")


class Drivers:
    """The processes that simulate a job's members, about as many in each."""

    def __init__(
        self,
        stack: ExitStack,
        coordinator: str,
        job: str,
        num_members: int,
        *,
        driver: Path = DRIVER,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        bounds = [num_members * index // NUM_DRIVERS for index in range(NUM_DRIVERS + 1)]
        for first, end in pairwise(bounds):
            share = {
                "coordinator": coordinator,
                "job": job,
                "first": first,
                "num_members": end - first,
                "desired": num_members,
                "heartbeat_s": heartbeat_s,
            }
            process = subprocess.Popen(
                [sys.executable, str(driver), json.dumps(share)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._processes.append(process)
            stack.callback(process.wait)
            stack.callback(process.kill)

    def ask(self, *commands: str) -> list[dict[str, Any]]:
        """Send one command to all processes, or one to each; return their answers."""
        each = commands * len(self._processes) if len(commands) == 1 else commands
        for process, command in zip(self._processes, each, strict=True):
            assert process.stdin is not None
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    @staticmethod
    def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a driver ended before it answered; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, kw_only=True)
class Running:
    """The coordinator's address and process id."""

    address: str
    pid: int


@contextmanager
def coordinator(heartbeat_s: float = HEARTBEAT_S) -> Iterator[Running]:
    """Run a coordinator and its etcd, as processes that end with the block."""
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor:
        directory = Path(name)
        (etcd,) = start_etcd(supervisor.spawn, directory / "etcd")
        ready = directory / "ready.json"
        arguments = (
            *(sys.executable, "-m", "shoal_client", "coordinator", "--etcd", etcd.endpoint),
            *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *("--heartbeat-s", str(heartbeat_s), "--ready-file", str(ready)),
        )
        log_path = directory / "coordinator.log"
        process = supervisor.spawn(
            ChildCommand(name="coordinator", arguments=arguments, log_path=log_path)
        )
        while not ready.exists():
            if process.wait(0.05) is not None:
                raise SystemExit(f"the coordinator did not start:\n{log_path.read_text()}")
        yield Running(address=json.loads(ready.read_text())["grpc"], pid=process.pid)


def join_to_commit(num_members: int) -> float:
    """Seconds from the last proposal until all members have the record."""
    with coordinator() as running, ExitStack() as stack:
        drivers = Drivers(stack, running.address, "scale", num_members)
        attended = drivers.ask("attend")
        drivers.ask("propose all", "propose others")
        before_s = cpu_s(running.pid)
        # Only the last member of the second process has not proposed yet.
        started = drivers.ask("state", "propose last")[1]
        held = drivers.ask("committed")
        records = {record for answer in held for record in answer["records"]}
        num_held = sum(answer["num_held"] for answer in held)
        if len(records) != 1 or num_held != num_members:
            raise SystemExit(f"{num_held} of {num_members} have {len(records)} different records")
        took_s = max(answer["held_s"] for answer in held) - started["started_s"]
        used_s = cpu_s(running.pid) - before_s
        attend_s = max(answer["attend_s"] for answer in attended)
        print(f"{num_members} attended within {attend_s:.2f} s")
        print(f"committed to all in {took_s:.3f} s, coordinator's CPU {used_s:.3f} s", flush=True)
        return took_s


def alive_cores(num_members: int, for_s: float) -> float:
    """CPU cores that the coordinator needs to keep the members alive."""
    with coordinator() as running, ExitStack() as stack:
        drivers = Drivers(stack, running.address, "scale", num_members)
        attended = drivers.ask("attend")
        print(f"{num_members} attended within {max(a['attend_s'] for a in attended):.2f} s")
        drivers.ask("state")
        pid = running.pid
        before_s, start_s = cpu_s(pid), time.monotonic()
        time.sleep(for_s)
        used_s, took_s = cpu_s(pid) - before_s, time.monotonic() - start_s
        states = drivers.ask("state")
        if failures := [text for state in states for text in state["failures"]]:
            raise SystemExit(f"some of {num_members} members failed: {failures}")
        sent, late, failed = (
            sum(state[key] for state in states) for key in ("beats", "late_beats", "failed_beats")
        )
        cores = used_s / took_s
        print(f"{num_members} kept alive for {took_s:.0f} s: {cores:.3f} cores")
        rate = sent / num_members / took_s
        print(f"{rate:.2f} beats per member and second; calls late {late}, failed {failed}")
        return cores


def form_cost_s(num_members: int) -> float:
    """CPU seconds per member of the state machine, from attendance to a running generation."""
    spec = JobSpec(job="j", min_members=1, max_members=num_members, desired_members=num_members)
    job = Job(spec=spec, limits=Limits(), digest_of=codec.digest_of)
    start_s, now_s = time.process_time(), 0.0
    proposal = Proposal(fields={"strategy": "ddp", "schema": "s"})
    names = {f"member-{number:05d}": new_incarnation() for number in range(num_members)}

    def handle(event: events.MemberEvent) -> None:
        nonlocal now_s
        now_s += 1e-6
        job.handle(event, now_s)
        job.next_deadline_s()

    for number, (name, incarnation) in enumerate(names.items()):
        host = number // 8
        info = MemberInfo(host=f"host-{host}", address=f"10.{host // 250}.{host % 250}.1")
        handle(events.MemberJoined(member_id=name, incarnation=incarnation, spec=spec, info=info))
    for name, incarnation in names.items():
        handle(events.TrainingProposed(member_id=name, incarnation=incarnation, proposal=proposal))
    assert job.agreement is not None
    generation, digest = job.agreement.generation, job.agreement.digest
    for name, incarnation in names.items():
        handle(
            events.RosterAnswered(
                member_id=name, incarnation=incarnation, generation=generation, digest=digest
            )
        )
    for name, incarnation in names.items():
        handle(
            events.ReadinessReported(member_id=name, incarnation=incarnation, generation=generation)
        )
    assert job.phase is Phase.RUNNING
    return (time.process_time() - start_s) / num_members


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_RUNS
    joins = [join_to_commit(1000) for _ in range(num_runs)]
    few, many = alive_cores(100, FEW_ALIVE_S), alive_cores(10_000, ALIVE_S)
    form_few = median(form_cost_s(100) for _ in range(20))
    form_many = median(form_cost_s(10_000) for _ in range(3))

    def row(metric: str, value: float, unit: str, runs: int = 1) -> Row:
        return Row(metric=metric, value=value, unit=unit, runs=runs)

    publish(
        "membership",
        [
            row("join_to_commit_1000", median(joins), "s", num_runs),
            row("heartbeat_cpu_10000", many, "cores"),
            row("member_cost_ratio_10000_to_100", (many / 10_000) / (few / 100), "ratio"),
            row("form_cost_ratio_10000_to_100", form_many / form_few, "ratio", 3),
        ],
    )


if __name__ == "__main__":
    main()
