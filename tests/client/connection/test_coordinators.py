"""Calls to the coordinators, and repetition of calls through outages."""

import socket
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from shoal_client.certificates.authority import CertificateHolder
from shoal_client.certificates.folder import CertificateFolder
from shoal_client.connection import coordinators as module
from shoal_client.connection.coordinators import (
    Channels,
    Closable,
    Coordinators,
    Method,
    close_channels,
    own_address,
)
from shoal_proto.errors import Unavailable
from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.names import COORDINATOR_NAME, Caller, CertificateRole
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

LIMIT_S = 30.0
STEAL_S = 0.2
"""Time in which another thread could close a channel that is not protected."""


def test_a_call_whose_channel_is_closed_before_it_begins_is_unavailable() -> None:
    """gRPC itself raises ValueError for a call on a closed channel."""
    coordinators = Coordinators(["127.0.0.1:1"])

    def get_cluster(channel: grpc.Channel) -> Method[pb.Cluster]:
        method = MembershipStub(channel).GetCluster
        coordinators.close()
        return method

    with pytest.raises(Unavailable, match="was closed"):
        coordinators.call(get_cluster, pb.GetClusterRequest(), timeout_s=10.0)


def test_a_channel_is_not_closed_while_a_stub_is_made_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC crashes the process if a stub is made on a closed channel. No stub is made after
    `close`."""
    coordinators, is_closed = Coordinators(["127.0.0.1:1"]), threading.Event()

    def record_close(channels: Iterable[Closable]) -> None:
        closed = list(channels)
        close_channels(closed)
        if closed:
            is_closed.set()

    monkeypatch.setattr(module, "close_channels", record_close)
    closing = threading.Thread(target=coordinators.close)

    def get_cluster(channel: grpc.Channel) -> Method[pb.Cluster]:
        closing.start()
        assert not is_closed.wait(STEAL_S)
        return MembershipStub(channel).GetCluster

    coordinators.on_channel(get_cluster)
    closing.join()
    assert is_closed.is_set()
    with pytest.raises(Unavailable, match="was closed"):
        coordinators.on_channel(get_cluster)


def test_channels_of_outdated_certificates_are_closed(tmp_path: Path) -> None:
    """The channel before the newest stays open as well, for calls in progress."""
    folder, channels = CertificateFolder(tmp_path), Channels(COORDINATOR_NAME)
    methods: list[Method[pb.Cluster]] = []
    folder.init()
    for number in range(4):
        caller = Caller(CertificateRole.WORKER, f"renewal-{number}")
        cert = folder.issue(CertificateHolder(caller=caller, valid=timedelta(hours=1)))
        files = TlsFiles(ca=tmp_path / "ca.crt", cert=cert, key=cert.with_suffix(".key"))
        with identity.using(files):
            methods.append(MembershipStub(channels.channel_to("127.0.0.1:1")).GetCluster)
            assert channels.channel_to("127.0.0.1:1") is channels.channel_to("127.0.0.1:1")
    for method in methods[:2]:
        with pytest.raises(ValueError, match="closed"):
            method(pb.GetClusterRequest(), timeout=LIMIT_S)
    for method in methods[2:]:
        with pytest.raises(grpc.RpcError):
            method(pb.GetClusterRequest(), timeout=LIMIT_S)
    assert channels.pop_all(keep=["127.0.0.1:1"]) == []
    close_channels(channels.pop_all())


def test_an_outage_is_counted_from_the_first_failure_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator may hold a call for long before it fails: that was no outage."""
    now_s = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    outcomes: Iterator[str | None] = iter(["held for long", None])

    def call() -> str:
        nonlocal now_s
        now_s += 60.0
        if (reason := next(outcomes)) is not None:
            raise Unavailable(reason)
        now_s -= 58.0
        return "answer"

    with capture_logs() as lines:
        assert Coordinators(["127.0.0.1:1"]).persist(call, waits_for="an answer") == "answer"
    assert [line.get("away_s") for line in lines] == [None, 2.0]


def test_an_address_of_this_machine_needs_one_coordinator_whose_name_resolves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod that waits for a node has no name in Kubernetes, and another coordinator leads."""
    resolve = socket.getaddrinfo
    failures = [socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_AGAIN, socket.EAI_NONAME]

    def fail_first(host: str, *rest: object, **options: object) -> object:
        if host == "replaced" or failures:
            raise socket.gaierror(failures.pop() if failures else socket.EAI_NONAME, "no such name")
        return resolve(host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", fail_first)
    addresses = ["replaced:7700", "127.0.0.1:7700"]
    with capture_logs() as lines:
        assert own_address(addresses, LIMIT_S) == "127.0.0.1"
    assert failures == []
    assert [each["event"] for each in lines] == ["coordinator_not_found"]
    with pytest.raises(Unavailable, match=r"no route to a coordinator; saw replaced:7700: .*name"):
        own_address(addresses[:1], 0.0)
