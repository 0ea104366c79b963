"""Many jobs on one cluster: 1,000 ended ones and 20 that train, while the leader is killed.

    make bench NAME=many_jobs
    .venv/bin/python bench/many_jobs.py 5     # takeovers

Real processes on this machine: etcd, and two coordinators that reach it through a proxy with a
round trip of 2 ms. Each running job has one member: a MemberSession, without a trainer.

- `takeover_1000_jobs`: time from the SIGKILL of the leader until the other coordinator serves.
- `takeover_jobs_disturbed`: running jobs whose generation, members, restarts or state changed
  within 10 s of a takeover, over all takeovers.
- `many_jobs_idle_cores`: CPU cores of the leader with the ended jobs only.
- `many_jobs_running_cores`: the same with the running jobs, whose members send two heartbeats a
  second, each in its own call.
- `many_jobs_metrics_s`: median time of a GET of `/metrics`.
- `health_cores_100`: cores for one report a second from each of 100 members of one job.
- `etcd_growth_mb_per_hour`: growth of etcd's database in an hour of 30 asynchronous jobs of 50
  members, each of which leases and completes a batch twice a second. Measured for a minute without
  compaction, with the coordinator's SamplesService in this process.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import httpx
from rows import Row, publish

from shoal_client.local.etcd import start_etcd
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_client.local.start_time import cpu_s
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.samples_pb2 import LeaseRequest
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_generations import record_to_json
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.coordinator.samples.service import SamplesService
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import JobProgress, JobResult, LifetimeFigures
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    RosterEntry,
    Step,
    Verdict,
)
from shoal_server.etcd import keys
from shoal_server.etcd.api import Operation, Put, absent
from shoal_server.etcd.leader_store import LeaderStore
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

NUM_OVER, NUM_RUNNING, NUM_GENERATIONS = 1000, 20, 3
NUM_REPORTING = 100
NUM_ASYNC, NUM_ASYNC_MEMBERS = 30, 50
BATCH, BATCHES_PER_S, GROWTH_S = 32, 2.0, 60.0
DELAY_S = 0.001
"""Each way."""
START_S, SETTLE_S, MEASURE_S = 60.0, 10.0, 20.0
POLL_S = 0.01


class DelayProxy:
    """Forwards TCP to a target, with a delay of DELAY_S each way, on its own event loop."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True).start()
        server = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result()
        self.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._target)
        except ConnectionError:
            writer.close()  # etcd has ended
            return
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self._loop.call_later(DELAY_S, writer.write, data)
        except ConnectionError:
            pass  # one side was killed: close the other one too
        finally:
            self._loop.call_later(DELAY_S, writer.close)


def job_that_is_over(name: str) -> list[Operation]:
    """Return the writes of a job's records as a coordinator leaves them, an hour after the job's
    end."""
    now_s = time.time()
    state = StateRecord(
        spec=JobSpec(job=name, max_members=8),
        last_generation=Generation(NUM_GENERATIONS),
        finished=True,
        reason="w0 completed its work",
        progress=JobProgress(trained_in=Generation(NUM_GENERATIONS), reached=Step(1000)),
        tally=LifetimeFigures(
            begun_s=now_s - 7200, result=JobResult(step=Step(1000), loss=0.1, num_samples=1)
        ),
        ended_s=now_s - 3600,
    )
    operations: list[Operation] = [Put(keys.job_state(name), state_to_json(state))]
    for number in range(1, NUM_GENERATIONS + 1):
        roster = GenerationRoster(
            generation=Generation(number),
            entries=(RosterEntry(member_id="w0", incarnation=f"{name}-{number}", rank=0),),
            source_member_id="w0",
            step=Step(0),
            planned=False,
            synchronous=True,
            fields={"strategy": "ddp"},
        )
        record = GenerationRecord(
            job=name,
            roster=roster,
            verdict=Verdict.COMMITTED,
            reason="all 1 members accepted",
            digest=codec.digest_of(roster),
            decided_s=now_s,
        )
        operations.append(Put(keys.generation(name, number), record_to_json(record)))
    return operations


async def write_jobs(endpoint: str) -> None:
    operations = [o for n in range(NUM_OVER) for o in job_that_is_over(f"over-{n:04d}")]
    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as store:
        for start in range(0, len(operations), 100):
            await store.transact((), operations[start : start + 100])


class Coordinators:
    """Two coordinators, of which one leads."""

    def __init__(self, supervisor: Supervisor, directory: Path, etcd: str) -> None:
        self._supervisor, self._directory, self._etcd = supervisor, directory, etcd
        self._num_started = 0
        self._running: list[tuple[Process, str, str]] = []
        """Each process with its addresses for gRPC and HTTP."""

    def start(self, listen: str = "127.0.0.1:0", options: Sequence[str] = ()) -> str:
        name = f"coordinator-{self._num_started}"
        self._num_started += 1
        ready, log_path = self._directory / f"{name}.json", self._directory / f"{name}.log"
        arguments = (
            *(sys.executable, "-m", "shoal_client", "coordinator", "--etcd", self._etcd),
            *("--listen", listen, "--http", "127.0.0.1:0", "--ready-file", str(ready)),
            *options,
        )
        process = self._supervisor.spawn(
            ChildCommand(name=name, arguments=arguments, log_path=log_path)
        )
        give_up_s = time.monotonic() + START_S
        while not ready.exists():
            if process.wait(POLL_S) is not None or time.monotonic() > give_up_s:
                raise SystemExit(f"a coordinator did not start:\n{log_path.read_text()[-2000:]}")
        addresses = json.loads(ready.read_text())
        self._running.append((process, addresses["grpc"], addresses["http"]))
        return str(addresses["grpc"])

    @property
    def leader(self) -> tuple[Process, str, str]:
        """The coordinator that leads, with its addresses. Waits up to START_S until one leads."""
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            for each in self._running:
                if _get(each[2] + "/readyz") == 200:
                    return each
            time.sleep(POLL_S)
        raise SystemExit("no coordinator leads")

    def kill_leader(self) -> float:
        """Kill the leader, and start a new coordinator at its address once the other one serves.
        Returns the seconds until then."""
        killed = self.leader
        self._running.remove(killed)
        os.kill(killed[0].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        assert self.leader is not killed
        took_s = time.monotonic() - killed_s
        self.start(killed[1])
        return took_s


def _get(url: str) -> int:
    try:
        return httpx.get(url, trust_env=False, timeout=5.0).status_code
    except httpx.HTTPError:
        return 0


def joined(coordinators: list[str], job: str, name: str, desired: int = 1) -> MemberSession:
    """Return the session of a new member that has reported that it is ready."""
    spec = pb.JobSpec(job=job, min_members=1, max_members=desired, desired_members=desired)
    member = Member(
        coordinators=coordinators,
        spec=spec,
        member_id=name,
        incarnation=new_incarnation(),
        info=pb.MemberInfo(host="h", pid=1, address="127.0.0.1"),
    )
    session = MemberSession(member)
    session.join()
    session.propose(
        {"strategy": "async-sgd", "schema": "s1"}, synchronous=False, step=0, has_state=False
    )
    session.ready(session.await_generation(0, 60.0))
    return session


def jobs(url: str) -> dict[str, dict[str, object]]:
    found = httpx.get(url + "/api/v1/jobs", trust_env=False, timeout=30.0).json()
    return {job["job"]: job for job in found if job["job"].startswith("runs-")}


def cores(pid: int, for_s: float) -> float:
    before_s, start_s = cpu_s(pid), time.monotonic()
    time.sleep(for_s)
    used_s = float(cpu_s(pid) - before_s)
    return used_s / (time.monotonic() - start_s)


def metrics_s(url: str) -> float:
    def once() -> float:
        start_s = time.monotonic()
        httpx.get(url + "/metrics", trust_env=False, timeout=30.0).raise_for_status()
        return time.monotonic() - start_s

    return median(once() for _ in range(10))


def health_cores(process: Process, url: str, sessions: list[MemberSession], job: str) -> float:
    """Return the CPU cores that health reports take: cores with reports, minus cores without."""
    idle = cores(process.pid, MEASURE_S)
    over = threading.Event()

    def report() -> None:
        due_s, step = time.monotonic(), 0
        with httpx.Client(trust_env=False) as client:
            while not over.is_set():
                step += 1
                for session in sessions:
                    token = session.token
                    path = f"/api/v1/jobs/{job}/members/{token.member_id}/health"
                    body = {"incarnation": token.incarnation, "step": step, "loss": 0.5}
                    client.post(url + path, json=body).raise_for_status()
                due_s += 1.0
                over.wait(max(0.0, due_s - time.monotonic()))

    with ThreadPoolExecutor(1) as pool:
        reporting = pool.submit(report)
        try:
            busy = cores(process.pid, MEASURE_S)
        finally:
            over.set()
        reporting.result()
    return busy - idle


async def _take_batches(samples: SamplesService, until_s: float) -> int:
    """Lease batches for all members at their pace; return the number that each completed."""
    requests = [
        LeaseRequest(
            token=Token(job=f"async-{job}", member_id=f"m{n:02d}", incarnation=new_incarnation()),
            dataset_size=10**9,
            num_epochs=1,
            num_samples=BATCH,
        )
        for job in range(NUM_ASYNC)
        for n in range(NUM_ASYNC_MEMBERS)
    ]
    due_s, num_batches = time.monotonic(), 0
    while due_s < until_s:
        for request in requests:
            request.sequence += 1
            leased = (await samples.Lease(request, None)).range  # type: ignore[arg-type]
            del request.completed[:]
            request.completed.append(leased)
        due_s, num_batches = due_s + 1 / BATCHES_PER_S, num_batches + 1
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    return num_batches


def etcd_mb(endpoint: str) -> float:
    """Return the used part of etcd's database in MB."""
    text = httpx.get(f"http://{endpoint}/metrics", trust_env=False).raise_for_status().text
    name = "etcd_mvcc_db_total_size_in_use_in_bytes "
    return float(next(x for x in text.splitlines() if x.startswith(name)).split()[1]) / 1e6


async def growth_mb_per_hour(endpoint: str) -> float:
    """Return the MB per hour by which the sample ledgers of all these jobs make etcd grow."""

    async def authorize(token: Token) -> None:
        """Admit every member."""

    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as store:
        leading = LeaderStore(store, lambda: (absent("another leader"),), print)
        samples = SamplesService(leading, authorize, lambda job: NUM_ASYNC_MEMBERS)
        async with samples:
            await _take_batches(samples, time.monotonic() + SETTLE_S)
            before_mb, started_s = etcd_mb(endpoint), time.monotonic()
            num_batches = await _take_batches(samples, started_s + GROWTH_S)
            grown_mb, took_s = etcd_mb(endpoint) - before_mb, time.monotonic() - started_s
    pace = num_batches / took_s
    print(f"{pace:.2f} batches a second and member; etcd grew by {grown_mb:.2f} MB", flush=True)
    return grown_mb * 3600 / took_s


def main() -> None:
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor, ExitStack() as stack:
        directory = Path(name)
        (etcd,) = start_etcd(supervisor.spawn, directory / "etcd")
        asyncio.run(write_jobs(etcd.endpoint))
        both = Coordinators(supervisor, directory, DelayProxy(etcd.endpoint).endpoint)
        addresses = [both.start(), both.start()]
        time.sleep(SETTLE_S)
        idle = cores(both.leader[0].pid, MEASURE_S)
        for number in range(NUM_RUNNING):
            stack.callback(joined(addresses, f"runs-{number:02d}", "a").close)
        before, took_s, disturbed = jobs(both.leader[2]), [], 0
        for _ in range(num_runs):
            took_s.append(both.kill_leader())
            time.sleep(SETTLE_S)
            after = jobs(both.leader[2])
            fields = ("generation", "num_members", "num_training", "num_restarts", "state")
            wrong = [
                f"{job}: {[known[f] for f in fields]}, then {[after[job][f] for f in fields]}"
                for job, known in before.items()
                if any(known[f] != after[job][f] for f in fields)
            ]
            disturbed += len(wrong)
            print(f"served after {took_s[-1]:.2f} s; disturbed: {wrong}", flush=True)
        process, _, url = both.leader
        busy, asked_s = cores(process.pid, MEASURE_S), metrics_s(url)
        print(f"idle {idle:.4f}, running {busy:.4f} cores; /metrics {asked_s:.4f} s", flush=True)
        with ThreadPoolExecutor(16) as pool:
            reporters = list(
                pool.map(
                    lambda n: joined(addresses, "reports", f"m{n:03d}", NUM_REPORTING),
                    range(NUM_REPORTING),
                )
            )
        for session in reporters:
            stack.callback(session.close)
        reporting = health_cores(process, url, reporters, "reports")
        growth = asyncio.run(growth_mb_per_hour(etcd.endpoint))
    publish(
        "many_jobs",
        [
            Row(metric="takeover_1000_jobs", value=median(took_s), unit="s", runs=num_runs),
            Row(metric="takeover_jobs_disturbed", value=disturbed, unit="jobs", runs=num_runs),
            Row(metric="many_jobs_idle_cores", value=idle, unit="cores", runs=1),
            Row(metric="many_jobs_running_cores", value=busy, unit="cores", runs=1),
            Row(metric="many_jobs_metrics_s", value=asked_s, unit="s", runs=10),
            Row(metric="health_cores_100", value=reporting, unit="cores", runs=1),
            Row(metric="etcd_growth_mb_per_hour", value=growth, unit="MB", runs=1),
        ],
    )


if __name__ == "__main__":
    main()
