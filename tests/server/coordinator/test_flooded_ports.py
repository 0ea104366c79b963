"""Coordinators with many silent connections on their ports continue with their jobs."""

import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support.clusters.coordinator_world import FIELDS
from support.clusters.etcd_fixture import running_etcd
from support.network import http
from support.processes.served_process import ServedProcess, awaited

from shoal_client.local.process import Supervisor
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1 import membership_pb2 as pb

DESCRIPTORS = 384
"""Limit of the coordinator's file descriptors."""
NUM_SILENT = 600
"""Connections to each port: more than the coordinator has descriptors."""
SOON_S = 60.0


class SilentConnections:
    """`NUM_SILENT` connections to each address, each opened again once it is closed."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = [address.rpartition(":") for address in addresses]
        self._stop = threading.Event()
        self.num_opened = 0

    def __enter__(self) -> "SilentConnections":
        self._thread = threading.Thread(target=self._open, name="strangers")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _open(self) -> None:
        with ExitStack() as stack:
            slots = [
                stack.enter_context(_Slot(host, int(port)))
                for host, _, port in self._addresses * NUM_SILENT
            ]
            while not self._stop.is_set():
                for slot in slots:
                    self.num_opened += slot.refresh()


class _Slot:
    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._socket: socket.socket | None = None

    def __enter__(self) -> "_Slot":
        return self

    def __exit__(self, *error: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def refresh(self) -> bool:
        """Open the connection if it is closed, and return True if so."""
        if self._socket is not None and not self._is_over(self._socket):
            return False
        if self._socket is not None:
            self._socket.close()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex(self._address)
        return True

    @staticmethod
    def _is_over(connected: socket.socket) -> bool:
        try:
            while connected.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


@contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def joined(stack: ExitStack, coordinator: ServedProcess, name: str) -> MemberSession:
    spec = pb.JobSpec(job="j", min_members=2, max_members=8, desired_members=2)
    member = MemberSession(
        Member(
            coordinators=[coordinator.grpc],
            spec=spec,
            member_id=name,
            incarnation=new_incarnation(),
            info=pb.MemberInfo(host="h", pid=1, address="127.0.0.1"),
        )
    )
    stack.callback(member.close)
    member.join()
    member.propose(FIELDS, synchronous=True, step=0, has_state=False)
    return member


@pytest.mark.nightly
def test_members_join_while_silent_connections_fill_the_ports(tmp_path: Path) -> None:
    """The coordinator does not run out of descriptors, closes connections, and stays the leader."""
    with ExitStack() as stack:
        stack.enter_context(many_descriptors())
        etcd = stack.enter_context(running_etcd(tmp_path))
        supervisor = stack.enter_context(Supervisor())
        coordinator = ServedProcess(
            supervisor,
            tmp_path,
            "coordinator",
            *("coordinator", "--etcd", etcd, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *("--handshake-s", "1", "--http-request-s", "1", "--leader-lease-s", "2"),
            under=("sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$0" "$@"'),
        ).ready()
        first = joined(stack, coordinator, "a")
        page = coordinator.http.removeprefix("http://")
        strangers = stack.enter_context(SilentConnections(coordinator.grpc, page))
        awaited(
            lambda: strangers.num_opened > 4 * NUM_SILENT,
            SOON_S,
            "the ports are full",
        )
        second = joined(stack, coordinator, "b")
        # The generation is written to etcd, and sent over streams that were open already.
        for member in (first, second):
            member.ready(member.await_generation(0, SOON_S))
        strangers.stop()
        metrics = awaited(lambda: _metrics(coordinator), SOON_S, "the page is reached again")
    assert "shoal_http_refused_connections_total{" in metrics
    log = coordinator.log_path.read_text()
    assert "leader_deposed" not in log
    assert "Too many open files" not in log


def _metrics(coordinator: ServedProcess) -> str:
    try:
        answer = http.get(f"{coordinator.http}/metrics")
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == 200 else ""
