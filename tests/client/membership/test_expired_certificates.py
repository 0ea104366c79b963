"""A certificate that expires while a job trains ends no member: it waits for a renewed one."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import structlog
from support.clusters.coordinator_world import FIELDS
from support.clusters.tls_world import HOUR

from shoal_client.certificates.authority import CertificateHolder
from shoal_client.certificates.folder import CertificateFolder
from shoal_client.connection.certificate_wait import VARIABLE
from shoal_client.connection.tls_refusals import why_refused
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.keeper import RestartPolicy
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.errors import CertificateRefused
from shoal_proto.incarnation import new_incarnation
from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.names import COORDINATOR_NAME, Caller, CertificateRole
from shoal_proto.v1 import membership_pb2 as pb

pytestmark = pytest.mark.long
WITHIN_S = 60.0
BRIEFLY = timedelta(seconds=8)


@contextmanager
def expiring(directory: Path) -> Iterator[tuple[LocalCluster, TlsFiles]]:
    """A cluster that restarts its coordinator, and a worker's certificate that is valid for
    seconds."""
    folder = CertificateFolder(directory / "certs")
    folder.init()
    config = LocalClusterConfig(
        directory=directory / "cluster",
        num_parameter_servers=0,
        certificates=folder.path,
        restart=RestartPolicy(),
        # A member that waits for its certificate must not be declared lost because the machine is
        # slow.
        limits={"--heartbeat-s": 5.0, "--join-s": 1200.0},
    )
    with LocalCluster(config) as cluster:
        cert = folder.issue(
            CertificateHolder(caller=Caller(CertificateRole.WORKER, "short"), valid=BRIEFLY)
        )
        yield cluster, TlsFiles(ca=folder.path / "ca.crt", cert=cert, key=cert.with_suffix(".key"))


def renew(files: TlsFiles) -> None:
    """Replace the expired certificate by another one of the same role, valid for an hour."""
    folder = CertificateFolder(files.cert.parent)
    made = folder.issue(
        CertificateHolder(caller=Caller(CertificateRole.WORKER, "fresh"), valid=HOUR)
    )
    made.with_suffix(".key").replace(files.key)
    made.replace(files.cert)


def a_member(cluster: LocalCluster) -> MemberSession:
    spec = pb.JobSpec(job="j", min_members=1, max_members=1, desired_members=1)
    info = pb.MemberInfo(host="h", pid=1, address="127.0.0.1")
    return MemberSession(
        Member(
            coordinators=[cluster.coordinator],
            spec=spec,
            member_id="a",
            incarnation=new_incarnation(),
            info=info,
        )
    )


def until(holds: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < give_up_s, f"not {what} within {WITHIN_S:g} s"
        time.sleep(0.05)


def trains(member: MemberSession) -> None:
    member.join()
    member.propose(FIELDS, synchronous=True, step=0, has_state=False)
    member.ready(member.await_generation(0))


def loses_its_coordinator(cluster: LocalCluster, expired: Callable[[], bool]) -> None:
    """Kill the coordinator once the certificate has expired; another one serves at its address."""
    until(expired, "expired")
    killed = cluster.processes["coordinator"]
    killed.send_signal(signal.SIGKILL)
    killed.wait(WITHIN_S)


def test_a_member_continues_once_its_certificate_is_renewed(tmp_path: Path) -> None:
    """The member keeps its incarnation and generation, and has reported what it waits for."""
    with (
        expiring(tmp_path) as (cluster, files),
        identity.using(files),
        closing(a_member(cluster)) as member,
        structlog.testing.capture_logs() as logged,
    ):
        trains(member)
        token = member.token
        loses_its_coordinator(
            cluster, lambda: why_refused(cluster.coordinator, COORDINATOR_NAME) is not None
        )
        until(lambda: any(e["event"] == "certificate_refused" for e in logged), "said")
        assert "no TLS connection" in member.waiting_for
        assert member.failure is None
        renew(files)
        until(lambda: not member.is_disconnected, "attending again")
        assert member.failure is None
        assert member.token == token
        assert member.begin_step(0) is None
        refused = next(e for e in logged if e["event"] == "certificate_refused")
        assert refused["member"] == "a" and "expired at" in refused["reason"]


def test_a_member_ends_after_its_own_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is CertificateRefused, with the bound and the variable that sets it."""
    monkeypatch.setenv(VARIABLE, "2")
    with (
        expiring(tmp_path) as (cluster, files),
        identity.using(files),
        closing(a_member(cluster)) as member,
    ):
        trains(member)
        loses_its_coordinator(
            cluster, lambda: why_refused(cluster.coordinator, COORDINATOR_NAME) is not None
        )
        until(lambda: member.failure is not None, "ended")
        assert isinstance(member.failure, CertificateRefused)
        assert f"for 2 s ({VARIABLE})" in member.failure.what
