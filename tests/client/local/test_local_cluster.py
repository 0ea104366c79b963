"""A cluster on this machine: its parts run during the block, and failures are reported."""

import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.clusters.etcd_fixture import running_etcd
from support.network import http

from shoal.membership.health import HealthReporter
from shoal_client.commands.status import StatusClient
from shoal_client.host.reports import check_reachable
from shoal_client.local.access import CERTIFICATES, LocalTls
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.directory import temporary_directory
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.options import ClusterOptions
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import InvalidSpec, Unavailable
from shoal_proto.etcd import etcd_pb2
from shoal_proto.etcd.etcd_pb2_grpc import KVStub
from shoal_proto.health import HealthFigures
from shoal_proto.incarnation import new_incarnation
from shoal_proto.tls import identity
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import CertificateRole
from shoal_proto.v1.membership_pb2 import JobSpec, Limits, MemberInfo

DEADLINE_S = 60.0


@pytest.mark.long
def test_all_parts_serve_during_the_block_and_end_with_it(tmp_path: Path) -> None:
    """The coordinator answers on both ports. A part that was killed stays away."""
    config = LocalClusterConfig(directory=tmp_path / "cluster", num_parameter_servers=1)
    with LocalCluster(config) as cluster:
        check_reachable([cluster.coordinator], DEADLINE_S)
        assert http.get(f"{cluster.http_url}/healthz", timeout=DEADLINE_S).status_code == 200
        processes = cluster.processes
        assert set(processes) == {"etcd", "coordinator", "ps-0"}
        processes["ps-0"].send_signal(signal.SIGKILL)
        assert processes["ps-0"].wait(DEADLINE_S) == -signal.SIGKILL
        assert set(cluster.processes) == {"etcd", "coordinator"}
    codes = {name: process.exit_code for name, process in processes.items()}
    assert codes["coordinator"] == 0
    assert codes["etcd"] is not None


@pytest.mark.long
def test_parts_do_not_import_modules_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's folder may have a module of any name, also of Python's own."""
    for name in ("secrets", "config", "server"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the script')")
    monkeypatch.chdir(tmp_path)
    config = LocalClusterConfig(directory=tmp_path / "cluster", num_parameter_servers=1)
    with LocalCluster(config) as cluster:
        check_reachable([cluster.coordinator], DEADLINE_S)


@pytest.mark.long
def test_parts_that_end_are_started_again(tmp_path: Path) -> None:
    """One part is killed, then all: each serves again at its address, and etcd has its data.

    The coordinator is restarted between the write and the kill of etcd: etcd 3.5.0 to 3.5.2 can
    lose data committed just before a kill.
    """
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    config = LocalClusterConfig(
        directory=tmp_path, num_parameter_servers=1, restart=RestartPolicy()
    )
    with LocalCluster(config, say=messages.put) as cluster:
        before, addresses = cluster.processes, list(cluster.parameter_servers)
        with EtcdKeys(cluster.etcd) as etcd:
            etcd.put("kept", "yes")
            before["coordinator"].send_signal(signal.SIGKILL)
            assert [messages.get(timeout=DEADLINE_S) for _ in range(2)] == [
                "coordinator was killed by SIGKILL; starting it again",
                "coordinator serves again",
            ]
            before = cluster.processes
            for process in before.values():
                process.send_signal(signal.SIGKILL)
            lines = [messages.get(timeout=DEADLINE_S) for _ in range(6)]
            assert etcd.get("kept") == "yes"
        assert sorted(lines) == sorted(
            [f"{name} was killed by SIGKILL; starting it again" for name in before]
            + [f"{name} serves again" for name in before]
        )
        check_reachable([cluster.coordinator], DEADLINE_S)
        assert http.get(f"{cluster.http_url}/healthz", timeout=DEADLINE_S).status_code == 200
        assert cluster.parameter_servers == addresses
        assert cluster.processes.keys() == before.keys()
        assert not {each.pid for each in before.values()} & {
            each.pid for each in cluster.processes.values()
        }
        assert cluster.failure_reason == ""
    assert cluster.processes == {}


@pytest.mark.long
def test_two_clusters_share_an_etcd(tmp_path: Path) -> None:
    """Each has its jobs and its leader under its own prefix. The second coordinator of a cluster
    takes over from the first."""
    with (
        running_etcd(tmp_path) as etcd,
        LocalCluster(sharing(etcd, tmp_path, "/team-a", num_coordinators=2)) as ours,
        LocalCluster(sharing(etcd, tmp_path, "/team-b")) as theirs,
    ):
        first, second = ours.coordinators
        join_as_the_only_member([first.grpc, second.grpc], "shared-name")
        (leader,) = [each for each in (first, second) if ready(each.http)]
        (other,) = [each for each in (first, second) if each is not leader]
        assert jobs_at(leader.http) == ["shared-name"]
        assert jobs_at(theirs.http_url) == []
        name = "coordinator" if leader is first else "coordinator-1"
        ours.processes[name].send_signal(signal.SIGKILL)
        deadline_s = time.monotonic() + DEADLINE_S
        while not ready(other.http) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        # The status client finds the leader among all addresses.
        with StatusClient(f"{leader.http},{other.http}") as status:
            assert [job["job"] for job in status.jobs()] == ["shared-name"]
        with EtcdKeys(etcd) as held:
            prefixes = {key.partition("/shoal/v1/")[0] for key in held.names()}
        assert prefixes == {"/team-a", "/team-b"}


def sharing(etcd: str, directory: Path, prefix: str, **options: Any) -> LocalClusterConfig:
    return LocalClusterConfig(
        directory=directory / prefix.strip("/"),
        num_parameter_servers=0,
        etcd=etcd,
        prefix=prefix,
        **options,
    )


def ready(url: str) -> bool:
    try:
        return http.get(f"{url}/readyz", timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        return False


def jobs_at(url: str) -> list[str]:
    return [job["job"] for job in http.get(f"{url}/api/v1/jobs", timeout=DEADLINE_S).json()]


@pytest.mark.long
def test_a_cluster_whose_etcd_cannot_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd's data is damaged. The reason names etcd and its log, which is kept, and is reported to
    callbacks that are set before or after. The other parts wait for etcd, and end with the
    cluster."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    policy = RestartPolicy(max_failures=2, first_pause_s=0.01)
    with ExitStack() as stack:
        directory = stack.enter_context(temporary_directory("shoal-up-"))
        config = LocalClusterConfig(directory=directory, num_parameter_servers=0, restart=policy)
        cluster = stack.enter_context(LocalCluster(config))
        cluster.call_on_failure(ended.put)
        for path in (directory / "etcd" / "etcd.etcd").rglob("*.wal"):
            path.write_bytes(b"no log at all")
        for process in cluster.processes.values():
            process.send_signal(signal.SIGKILL)
        reason = ended.get(timeout=DEADLINE_S)
        assert reason.startswith("etcd cannot stay up: it did not come up again")
        assert str(directory / "etcd" / "etcd.log") in reason
        assert cluster.failure_reason == reason
        cluster.call_on_failure(ended.put)
        assert ended.get(timeout=DEADLINE_S) == reason
    assert cluster.processes == {}
    assert (directory / "etcd" / "etcd.log").exists()


@pytest.mark.long
def test_the_error_for_a_part_that_does_not_start_has_its_log(tmp_path: Path) -> None:
    """The part's port is in use. The other parts are stopped."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = LocalClusterConfig(directory=tmp_path, num_parameter_servers=0, listen=address)
        cluster = LocalCluster(config)
        with pytest.raises(Unavailable, match="coordinator of the local cluster") as raised:
            cluster.__enter__()
    assert address in raised.value.fix
    assert cluster.processes == {}


@pytest.mark.long
def test_the_time_limits_of_a_command_reach_its_coordinator(tmp_path: Path) -> None:
    """Members get these limits when they join."""
    assert ClusterOptions().limits == {}
    given = ClusterOptions(join_s=600, collective_s=7).limits
    config = LocalClusterConfig(directory=tmp_path, num_parameter_servers=0, limits=given)
    with LocalCluster(config) as cluster:
        limits = join_as_the_only_member([cluster.coordinator], "limits")
    assert (limits.join_s, limits.collective_s, limits.heartbeat_s) == (600, 7, 0.5)


def join_as_the_only_member(coordinators: Sequence[str], job: str) -> Limits:
    """Join the job and leave it at once; return the limits from its coordinator."""
    member = Member(
        coordinators=coordinators,
        spec=JobSpec(job=job, min_members=1, max_members=1, desired_members=1),
        member_id="m",
        incarnation=new_incarnation(),
        info=MemberInfo(host="h"),
    )
    membership = MemberSession(member)
    membership.join(DEADLINE_S)
    limits = membership.limits
    membership.leave(completed=True, reason="seen")
    return limits


@pytest.mark.long
def test_members_on_other_hosts_report_their_health(tmp_path: Path) -> None:
    """Other hosts cannot reach the page, which is on loopback and shown to this user only: members
    report at another address."""
    config = LocalClusterConfig(
        directory=tmp_path / "cluster",
        num_parameter_servers=0,
        advertise="127.0.0.2",
        tls=LocalTls(),
    )
    with LocalCluster(config) as cluster, ExitStack() as stack:
        files = in_folder(config.directory / CERTIFICATES, CertificateRole.WORKER)
        stack.enter_context(identity.using(files))
        member = Member(
            coordinators=[cluster.coordinators[0].advertised],
            spec=JobSpec(job="far", min_members=1, max_members=1, desired_members=1),
            member_id="m",
            incarnation=new_incarnation(),
            info=MemberInfo(host="other"),
        )
        session = stack.enter_context(closing(MemberSession(member)))
        session.join(DEADLINE_S)
        assert session.http_url.startswith("https://127.0.0.2:")
        with HealthReporter(session.http_url, "far", "m", member.incarnation) as health:
            health.update(HealthFigures(step=3, loss=0.25))
            health.close(DEADLINE_S)
        with StatusClient(cluster.http_url) as status:
            (shown,) = status.job("far")["members"]
        assert (shown["health"]["step"], shown["health"]["loss"]) == (3, 0.25)


@pytest.mark.long
def test_the_error_for_contradictory_limits_has_their_order(tmp_path: Path) -> None:
    """The error contains the coordinator's message."""
    limits = {"--join-s": 10.0, "--collective-s": 9.0}
    config = LocalClusterConfig(directory=tmp_path, num_parameter_servers=0, limits=limits)
    with pytest.raises(Unavailable, match="exited with code 2") as raised:
        LocalCluster(config).__enter__()
    assert "watchdog_s (18 s) must stay below join_s (10 s)" in raised.value.fix


class EtcdKeys:
    """A client that puts, gets and lists keys of etcd."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint)
        self._kv = KVStub(self._channel)

    def __enter__(self) -> "EtcdKeys":
        return self

    def __exit__(self, *exc: object) -> None:
        self._channel.close()

    def put(self, key: str, value: str) -> None:
        request = etcd_pb2.PutRequest(key=key.encode(), value=value.encode())
        self._kv.Put(request, timeout=DEADLINE_S)

    def get(self, key: str) -> str:
        request = etcd_pb2.RangeRequest(key=key.encode())
        found = self._kv.Range(request, timeout=DEADLINE_S, wait_for_ready=True)
        return "".join(item.value.decode() for item in found.kvs)

    def names(self) -> list[str]:
        request = etcd_pb2.RangeRequest(key=b"\0", range_end=b"\0", keys_only=True)
        return [item.key.decode() for item in self._kv.Range(request).kvs]


def test_a_negative_number_of_servers_is_refused(tmp_path: Path) -> None:
    """The settings raise the error."""
    with pytest.raises(InvalidSpec, match="-1"):
        LocalClusterConfig(directory=tmp_path, num_parameter_servers=-1)
    with pytest.raises(InvalidSpec, match="0"):
        LocalClusterConfig(directory=tmp_path, num_coordinators=0)


ORPHANS = """
import subprocess, sys
from shoal_client.local.leftovers import adopt_orphans, descendants, sweep
adopt_orphans()
code = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
subprocess.run([sys.executable, "-c", code], check=True)
assert [each for each in descendants().values() if each == "sleep 600"], descendants()
left = sweep(0.1)
assert list(left.values()) == ["sleep 600"], left
assert sweep(10.0) == {}
print("swept")
"""


def test_an_orphaned_grandchild_is_killed() -> None:
    """The sweep kills a grandchild that has a session of its own and whose parent has ended."""
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout == "swept\n", done.stderr


def test_a_directory_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = LocalClusterConfig(directory=tmp_path / "file" / "below", num_parameter_servers=0)
    with pytest.raises(InvalidSpec, match=r"cannot be made; saw .*below: Not a directory"):
        LocalCluster(config).__enter__()
