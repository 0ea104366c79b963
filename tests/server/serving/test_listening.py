"""Listening addresses, announced addresses, and the warnings about both."""

import json
import socket
import sys
from pathlib import Path

import pytest
import structlog
from support.clusters.etcd_fixture import running_etcd

from shoal_client.certificates.folder import CertificateFolder
from shoal_client.cli import parse
from shoal_client.local.process import ChildCommand, Supervisor
from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import identity
from shoal_server.coordinator.config import CoordinatorConfig
from shoal_server.etcd.remote.config import EtcdConfig, parse_endpoints
from shoal_server.parameters.config import ParameterServerConfig
from shoal_server.serving.listening import (
    advertised_address,
    is_loopback,
    listen_address,
    warn_of_exposure,
)

START_S = 60.0


@pytest.mark.parametrize(
    ("listen", "bind", "address"),
    [
        ("7700", "127.0.0.1", "127.0.0.1:7700"),
        ("7700", "0.0.0.0", "0.0.0.0:7700"),
        ("7700", "::1", "[::1]:7700"),
        ("7700", "[::]", "[::]:7700"),
        ("10.0.0.7:1", "127.0.0.1", "10.0.0.7:1"),
        ("[::1]:0", "0.0.0.0", "[::1]:0"),
    ],
)
def test_a_port_alone_is_served_at_the_bind_address(listen: str, bind: str, address: str) -> None:
    assert listen_address(listen, bind) == address


@pytest.mark.parametrize("listen", ["", "somewhere", "70000", "host:70000", "-1", "[]:80"])
def test_an_invalid_listening_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidSpec, match="expected host:port, or a port"):
        listen_address(listen, "127.0.0.1")


@pytest.mark.parametrize(
    ("advertise", "listen", "address"),
    [
        ("", "127.0.0.1:0", "127.0.0.1:9"),
        ("", "10.0.0.7:0", "10.0.0.7:9"),
        ("", "[::1]:0", "[::1]:9"),
        ("", "0.0.0.0:0", f"{socket.gethostname()}:9"),
        ("", "[::]:0", f"{socket.gethostname()}:9"),
        ("name", "0.0.0.0:0", "name:9"),
        ("name:8", "127.0.0.1:0", "name:8"),
        ("fe80::1", "0.0.0.0:0", "[fe80::1]:9"),
        ("[fe80::1]", "0.0.0.0:0", "[fe80::1]:9"),
        ("[fe80::1]:8", "0.0.0.0:0", "[fe80::1]:8"),
        ("0.0.0.0:8", "0.0.0.0:0", f"{socket.gethostname()}:8"),
        ("[::]:8", "0.0.0.0:0", f"{socket.gethostname()}:8"),
        ("::", "0.0.0.0:0", f"{socket.gethostname()}:9"),
    ],
)
def test_the_announced_address_is_reachable(advertise: str, listen: str, address: str) -> None:
    assert advertised_address(advertise, listen, 9) == address


@pytest.mark.parametrize("advertise", ["name:²", "name:http", "name:0", "name:65536", "name:"])
def test_an_address_that_nobody_can_reach_is_not_announced(advertise: str) -> None:
    with pytest.raises(InvalidSpec, match="bad --advertise"):
        advertised_address(advertise, "0.0.0.0:0", 9)


def test_only_this_machine_is_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.0.0.9", "::1", "[::1]", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "vm-0", ""]))


def test_the_defaults_are_loopback() -> None:
    etcd = EtcdConfig(endpoints=parse_endpoints("127.0.0.1:2379"))
    coordinator = CoordinatorConfig(etcd=etcd)
    for address in (coordinator.listen, coordinator.http, ParameterServerConfig(etcd=etcd).listen):
        assert address.startswith("127.0.0.1:")


@pytest.mark.sampled()
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("coordinator", ("--bind", "0.0.0.0")),
        ("coordinator", ("--http", "0.0.0.0:7780")),
        ("coordinator", ("--listen", "somewhere:7700")),
        ("ps", ("--bind", "::")),
        ("ps", ("--listen", "10.0.0.7:7710")),
    ],
)
def test_without_tls_only_loopback_addresses_are_accepted(
    tmp_path: Path, program: str, options: tuple[str, ...]
) -> None:
    """`--insecure` permits others. With a certificate the option is refused."""
    with pytest.raises(
        ValueError, match=r"other machines can reach would be served without TLS.*--insecure"
    ):
        parse([program, *options])
    parse([program, *options, "--insecure"])
    CertificateFolder(tmp_path / "certs").init()
    with identity.using(None):
        parse([program, *options, "--tls", str(tmp_path / "certs")])
        assert identity.own() is not None
        with pytest.raises(ValueError, match="--insecure contradicts TLS"):
            parse([program, *options, "--tls", str(tmp_path / "certs"), "--insecure"])


def test_ports_open_to_other_machines_are_one_warning() -> None:
    with structlog.testing.capture_logs() as logs:
        warn_of_exposure({"grpc": "127.0.0.1:1", "http": "[::1]:2"}, ["127.0.0.1:2379"])
        assert logs == []
        warn_of_exposure({"grpc": "0.0.0.0:1", "http": "127.0.0.1:2"}, ["127.0.0.1:2379"])
        warn_of_exposure({"grpc": "127.0.0.1:1"}, ["127.0.0.1:2379", "etcd-1:2379"])
    opened, hidden = logs
    assert opened["event"] == "ports_open_to_others" and opened["log_level"] == "warning"
    assert opened["grpc"] == "0.0.0.0:1" and "http" not in opened
    assert "read parameters and end jobs" in opened["reason"]
    assert hidden["event"] == "reachable_from_this_host_only" and "--bind" in hidden["reason"]


@pytest.mark.parametrize("program", ["coordinator", "ps"])
def test_the_ready_file_of_an_earlier_process_is_removed(tmp_path: Path, program: str) -> None:
    """Without etcd the new process is not ready. `/tmp` of a pod outlives its container."""
    ready = tmp_path / "ready.json"
    ready.write_text("{}")
    http = ("--http", "127.0.0.1:0") if program == "coordinator" else ()
    with Supervisor() as supervisor:
        process = supervisor.spawn(
            ChildCommand(
                name=program,
                arguments=[
                    *(sys.executable, "-m", "shoal_client", program, "--etcd", "127.0.0.1:1"),
                    *("--listen", "127.0.0.1:0", "--ready-file", str(ready), *http),
                ],
                log_path=(log := tmp_path / "log"),
            )
        )
        while ready.exists():
            assert process.wait(0.05) is None, log.read_text()


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("bind", ["", "0.0.0.0"])
def test_every_socket_of_a_process_is_at_the_bind_address(tmp_path: Path, bind: str) -> None:
    """The listening sockets are read from /proc."""
    at = ("--bind", bind, "--insecure") if bind else ()
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        for program, more in (("coordinator", ("--http", "0")), ("ps", ("--id", "ps-0"))):
            ready = tmp_path / f"{program}.json"
            process = supervisor.spawn(
                ChildCommand(
                    name=program,
                    arguments=[
                        *(sys.executable, "-m", "shoal_client", program, "--etcd", etcd),
                        *("--listen", "0", "--ready-file", str(ready), *at, *more),
                    ],
                    log_path=(log := tmp_path / f"{program}.log"),
                )
            )
            while not ready.exists():
                assert process.wait(0.05) is None, log.read_text()
            hosts = _listening_hosts(process.pid)
            assert len(hosts) == 2 and set(hosts) == {bind or "127.0.0.1"}
            announced = json.loads(ready.read_text())["grpc"].rpartition(":")[0]
            assert announced == (socket.gethostname() if bind else "127.0.0.1")
            num_warnings = log.read_text().count("ports_open_to_others")
            assert num_warnings == (1 if bind else 0)


def _listening_hosts(pid: int) -> list[str]:
    """Return the IPv4 addresses of the process' listening TCP sockets; IPv6's wildcard as
    0.0.0.0."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = str(descriptor.readlink())
        if target.startswith("socket:["):
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    hosts = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                raw = columns[1].partition(":")[0][-8:]
                hosts.append(socket.inet_ntoa(bytes.fromhex(raw)[::-1]))
    return hosts
