"""Coordinator processes on a real etcd: they start, end and are killed."""

import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.coordinator_world import FIELDS
from support.clusters.etcd_fixture import etcd_processes, running_etcd
from support.network import http
from support.processes.served_process import awaited

from shoal_client.local.etcd import start_members
from shoal_client.local.process import ChildCommand, Supervisor
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import NotLeader
from shoal_proto.incarnation import new_incarnation
from shoal_proto.status import from_rpc_error
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

START_S = 30.0
TAKE_OVER_S = 20.0


def replica(supervisor: Supervisor, directory: Path, name: str, etcd: str) -> CoordinatorProcess:
    """Start a coordinator with the shortest lease, and wait until it serves."""
    found = CoordinatorProcess(supervisor, directory, name, etcd, heartbeat_s=0.2, lease_s=2)
    return found.ready()


def member(name: str, coordinators: list[str], desired: int) -> MemberSession:
    spec = pb.JobSpec(job="j", min_members=1, max_members=8, desired_members=desired)
    return MemberSession(
        Member(
            coordinators=coordinators,
            spec=spec,
            member_id=name,
            incarnation=new_incarnation(),
            info=pb.MemberInfo(host="h", pid=1, address="127.0.0.1"),
        )
    )


def form(members: list[MemberSession]) -> pb.GenerationRecord:
    """Let the members join, propose and bring the generation up."""

    def join(one: MemberSession) -> pb.GenerationRecord:
        one.join()
        one.propose(FIELDS, synchronous=True, step=0, has_state=False)
        record = one.await_generation(0, START_S)
        one.ready(record)
        return record

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(join, members)).pop()


def job_when_running(url: str, within_s: float) -> dict[str, Any]:
    """Return the job as the coordinator shows it, once it runs."""
    deadline_s = time.monotonic() + within_s
    while True:
        answer = http.get(f"{url}/api/v1/jobs/j")
        if answer.status_code == 200 and answer.json()["summary"]["phase"] == "running":
            return dict(answer.json())
        assert time.monotonic() < deadline_s, answer.text
        time.sleep(0.05)  # the state of another process can only be polled


@contextmanager
def closing(members: list[MemberSession]) -> Iterator[list[MemberSession]]:
    try:
        yield members
    finally:
        for one in members:
            one.close()


@pytest.mark.long
def test_a_killed_leader_is_succeeded_and_the_generation_runs_on(tmp_path: Path) -> None:
    """Members find the new leader. Until it leads, only `/readyz?standby=1` shows it as ready."""
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        first = replica(supervisor, tmp_path, "first", etcd)
        second = replica(supervisor, tmp_path, "second", etcd)
        assert http.get(f"{first.http}/readyz").status_code == 200
        assert http.get(f"{second.http}/readyz").status_code == 503
        # With `standby=1` a coordinator that does not lead is ready, so that a rollout continues.
        assert http.get(f"{second.http}/readyz?standby=1").status_code == 200
        addresses = [first.grpc, second.grpc]
        with closing([member(name, addresses, 2) for name in ("a", "b")]) as members:
            form(members)
            first.process.send_signal(signal.SIGKILL)
            answer = job_when_running(second.http, TAKE_OVER_S)
            assert answer["summary"]["generation"] == 1
            assert {m["member"]["member_id"] for m in answer["members"]} == {"a", "b"}
            for one in members:
                assert not one.is_broken(1)
                assert one.begin_step(0) is None


@pytest.mark.long
def test_a_coordinator_that_does_not_lead_sends_members_to_the_leader(tmp_path: Path) -> None:
    """A worker may be given the address of any coordinator."""
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        replica(supervisor, tmp_path, "first", etcd)
        second = replica(supervisor, tmp_path, "second", etcd)
        with closing([member("a", [second.grpc], 1)]) as members:
            record = form(members)
            assert [e.member_id for e in record.roster.entries] == ["a"]


@pytest.mark.long
def test_a_generation_runs_on_while_etcd_is_unavailable(tmp_path: Path) -> None:
    """No member is declared lost, then or once etcd is back."""
    with etcd_processes(tmp_path) as (_, (etcd,)), Supervisor() as supervisor:
        only = replica(supervisor, tmp_path, "c", etcd.endpoint)
        with closing([member(name, [only.grpc], 2) for name in ("a", "b")]) as members:
            form(members)
            etcd.process.send_signal(signal.SIGSTOP)
            # Longer than a member's lease.
            assert not members[0].wait_generation_over(1, timeout_s=2.0)
            assert members[0].begin_step(0) is None
            etcd.process.send_signal(signal.SIGCONT)
            job_when_running(only.http, TAKE_OVER_S)
            assert not any(one.is_broken(1) for one in members)


@pytest.mark.long
def test_a_coordinator_that_starts_without_etcd_waits_for_it(tmp_path: Path) -> None:
    """A coordinator without etcd serves, reports why it does not lead, and leads once etcd is
    back."""
    with etcd_processes(tmp_path) as (_, (etcd,)), Supervisor() as supervisor:
        etcd.process.kill()
        etcd.process.wait()
        only = replica(supervisor, tmp_path, "c", etcd.endpoint)
        response = http.get(f"{only.http}/readyz")
        assert (response.status_code, "etcd does not answer" in response.text) == (503, True), (
            response.text
        )
        with grpc.insecure_channel(only.grpc) as channel, pytest.raises(grpc.RpcError) as failed:
            MembershipStub(channel).GetJob(pb.GetJobRequest(job="j"), timeout=START_S)
        error = from_rpc_error(failed.value, only.grpc)
        assert isinstance(error, NotLeader)
        assert "etcd does not answer" in str(error)
        start_members(supervisor.spawn, [etcd.member])
        awaited(only.leads, START_S, "it leads once etcd is back")


@pytest.mark.long
def test_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    """The exit code after SIGTERM is 0, and the successor leads without waiting for the lease of 60
    s."""
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        start = partial(CoordinatorProcess, supervisor, tmp_path, heartbeat_s=0.2, lease_s=60)
        first = start("first", etcd).ready()
        awaited(first.leads, START_S, "the first leads")
        assert first.process.stop(10) == 0, first.log_path.read_text()
        second = start("second", etcd).ready()
        awaited(second.leads, START_S, "the second leads, long before that lease is over")


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--etcd", "nowhere"], "bad etcd endpoint"),
        (["--heartbeat-s", "0"], "bad --heartbeat-s; saw 0"),
        (["--join-s", "1"], "Raise --join-s"),
        (["--listen", "somewhere"], "expected host:port"),
        (["--etcd-user", "u"], "password"),
    ],
)
def test_a_bad_argument_gives_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    """The line names the argument or the problem; the exit code is 1 or 2."""
    log_path = tmp_path / "log"
    command = ChildCommand(
        name="bad",
        arguments=[
            *(sys.executable, "-m", "shoal_client", "coordinator"),
            *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments),
        ],
        log_path=log_path,
    )
    with Supervisor() as supervisor:
        code = supervisor.spawn(command).wait(START_S)
    assert code in (1, 2)
    lines = [line for line in log_path.read_text().splitlines() if line]
    assert words in lines[-1]
    assert len(lines) == 1, lines


@pytest.mark.long
def test_the_error_for_a_port_in_use_has_the_address(tmp_path: Path) -> None:
    """The error for a port of gRPC or HTTP has the address, and says that port 0 takes a free
    one."""
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        holder = replica(supervisor, tmp_path, "holder", etcd)
        http_address = holder.http.removeprefix("http://")
        for option, address in (("--listen", holder.grpc), ("--http", http_address)):
            log_path = tmp_path / f"{option}.log"
            ports = {"--listen": "127.0.0.1:0", "--http": "127.0.0.1:0", option: address}
            arguments = [part for pair in ports.items() for part in pair]
            command = ChildCommand(
                name="late",
                arguments=[
                    *(sys.executable, "-m", "shoal_client", "coordinator", "--etcd", etcd),
                    *arguments,
                ],
                log_path=log_path,
            )
            assert supervisor.spawn(command).wait(START_S) == 1
            assert address in log_path.read_text()
            assert "port 0 takes any free one" in log_path.read_text()
