"""`shoal up`: a cluster on this machine, until Ctrl-C, or a control plane on several hosts."""

import os
import queue
import re
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated

from cyclopts import Group, Parameter

from shoal_client.commands.address import DEFAULT_URL
from shoal_client.host.reports import check_reachable
from shoal_client.host.stop_orders import StopOrders, next_of
from shoal_client.local.access import LocalTls
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.directory import given_directory, temporary_directory
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.options import ClusterOptions
from shoal_client.remote.control_plane import (
    ControlPlane,
    ControlPlaneConfig,
    ControlPlaneHosts,
    check_number,
    start,
)
from shoal_client.remote.ssh import HostNames
from shoal_proto.addresses import split_address
from shoal_proto.errors import AddressInUse, InvalidSpec, Unavailable
from shoal_proto.names import check_prefix
from shoal_proto.tls import identity
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import CertificateRole

GRPC_PORT = 7700
HTTP_PORT = 7780
MAX_BASE_PORT = 2**16 - 4
CONNECTS_WITHIN_S = 3.0
LEADS_WITHIN_S = 15.0
"""Time to wait for a leader: a killed coordinator leads until its lease ends."""
_HOSTS = Group(
    "Several hosts, over ssh",
    help="The hosts must have Shoal and an etcd program, and accept your ssh key without a"
    " password.",
)


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Runs etcd, coordinators and parameter servers on this machine until Ctrl-C. A part that dies
    is restarted. With --hosts: starts an etcd member, a coordinator and some of the parameter
    servers on each host over ssh, and returns; `shoal down` ends them."""

    directory: Annotated[Path | None, Parameter(name="--dir", metavar="DIRECTORY")] = None
    """Directory for logs and etcd's data. By default a temporary one. With --hosts: directory on a
    local disk of each host, by default in /var/tmp, and for certificates on this machine, by
    default in ~/.shoal."""
    port: Annotated[int | None, Parameter(metavar="PORT")] = None
    """Port of the coordinator; 0: any free port. By default 7700, or any free port if that is
    taken. With --hosts: the first of four ports on each host, by default any free ones."""
    http_port: Annotated[int | None, Parameter(metavar="PORT")] = None
    """Port of the status page and its API; 0: any free port. By default 7780, or any free port if
    that is taken."""
    snapshot_roots: Annotated[
        Sequence[str], Parameter(name="--snapshot-root", metavar="URL", allow_repeating=True)
    ] = ()
    """Allow snapshots at and below this URL as well. May be repeated. By default they are allowed
    only in `snapshots` in --dir."""
    num_coordinators: Annotated[int, Parameter(name="--coordinators", metavar="N")] = 1
    """Number of coordinators. One leads; if it dies, another takes over within seconds."""
    etcd: Annotated[str, Parameter(metavar="HOST:PORT,...")] = ""
    """Addresses of an existing etcd. By default one is started."""
    prefix: Annotated[str, Parameter(metavar="/NAME")] = ""
    """Prefix of all keys of this cluster in etcd, so that several clusters can share one etcd."""
    verbose: Annotated[bool, Parameter(name=["-v", "--verbose"], negative=())] = False
    """Make all parts log everything they do: SHOAL_LOG_LEVEL=debug."""
    tls: bool = False
    """Use TLS; this is the default. Certificates are made in `certs` in --dir, and renewed while
    the cluster runs."""
    http_tokens: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """File of tokens, made by `shoal token`, with which other users of this machine access the
    status page. By default only the user that runs this command, and root, have access."""
    hosts: Annotated[HostNames, Parameter(group=_HOSTS)] = ()
    """1, 3 or 5 hosts of a control plane. All are needed at its start; then the control plane
    serves as long as more than half of the hosts run. localhost: this machine."""
    python: Annotated[str, Parameter(name="--host-python", metavar="PATH", group=_HOSTS)] = ""
    """Python with Shoal on the hosts. By default the path of the Python that runs this command."""
    cluster: Annotated[ClusterOptions, Parameter(name="*")] = field(default_factory=ClusterOptions)

    def __post_init__(self) -> None:
        for option, port in (("--port", self.port), ("--http-port", self.http_port)):
            if port is not None and not 0 <= port < 2**16:
                raise InvalidSpec(f"bad {option}", seen=str(port), expected="0 to 65535")
        check_prefix(self.prefix)
        self._check_hosts()
        with_tls = {"--tls": self.tls, "--http-tokens": self.http_tokens is not None}
        for option, is_given in with_tls.items():
            if is_given and self.cluster.insecure:
                raise InvalidSpec(
                    f"--insecure contradicts {option}",
                    seen="both",
                    expected="one of them, or neither",
                )
        if self.num_coordinators < 1:
            raise InvalidSpec(
                "bad --coordinators", seen=str(self.num_coordinators), expected="1 or more"
            )
        for endpoint in self.etcd.split(",") if self.etcd else ():
            if not re.fullmatch(r"[^/]+:\d{1,5}", endpoint):
                raise InvalidSpec("bad --etcd", seen=endpoint, expected="host:port,...")

    def _check_hosts(self) -> None:
        if not self.hosts:
            if self.python:
                raise InvalidSpec("--host-python is for --hosts", seen="no --hosts")
            return
        check_number(self.hosts)
        one_machine = {
            "--http-port": self.http_port is not None,
            "--coordinators": self.num_coordinators != 1,
            "--etcd": bool(self.etcd),
            "--insecure": self.cluster.insecure,
            "--http-tokens": self.http_tokens is not None,
        }
        if given := [option for option, is_given in one_machine.items() if is_given]:
            raise InvalidSpec(
                f"{' and '.join(given)} cannot be used with --hosts",
                seen="both",
                expected="options for a control plane on several hosts",
                fix="Each host has an etcd member and a coordinator, with TLS; its page has the"
                " port after that of --port.",
            )
        if self.port and self.port > MAX_BASE_PORT:
            raise InvalidSpec(
                "bad --port", seen=str(self.port), expected=f"at most {MAX_BASE_PORT} with --hosts"
            )


def up(config: UpConfig) -> int:
    """Run a cluster. Returns 0 after Ctrl-C or SIGTERM, or once a control plane on several hosts is
    up; 1 if a part does not stay up."""
    if config.hosts:
        return _up_on_hosts(config)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    orders = StopOrders()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A repeated signal must not interrupt the stop of the cluster.
        if not orders.is_repeated(number):
            raise KeyboardInterrupt

    _check_ports(config)
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        try:
            directory = stack.enter_context(
                temporary_directory("shoal-up-")
                if config.directory is None
                else given_directory(config.directory)
            )
            if config.etcd:
                _check_listens(config.etcd)
            started = LocalClusterConfig(
                directory=directory,
                num_parameter_servers=config.cluster.num_parameter_servers,
                listen=_address(config.port, GRPC_PORT),
                http=_address(config.http_port, HTTP_PORT),
                limits=config.cluster.limits,
                restart=RestartPolicy(),
                snapshot_roots=config.snapshot_roots,
                num_coordinators=config.num_coordinators,
                etcd=config.etcd,
                prefix=config.prefix,
                environment=_environment(config),
                tls=None if config.cluster.insecure else LocalTls(http_tokens=config.http_tokens),
            )
            cluster = stack.enter_context(LocalCluster(started, say=_say))
            if cluster.certificates is not None:
                files = in_folder(cluster.certificates, CertificateRole.OPERATOR)
                stack.enter_context(identity.using(files))
            if config.etcd:
                _await_leader(cluster, config.etcd)
            cluster.call_on_failure(ended.put)
            print(_welcome(cluster, directory), flush=True)
            _say(f"stopping the cluster: {next_of(ended)}")
            return 1
        except KeyboardInterrupt:
            print("stopping", flush=True)
            return 0


def _up_on_hosts(config: UpConfig) -> int:
    # A relative path would have another meaning on the hosts.
    directory = "" if config.directory is None else str(config.directory.absolute())
    hosts = ControlPlaneHosts(names=config.hosts, directory=directory, python=config.python)
    control_plane = start(
        ControlPlaneConfig(
            hosts=hosts,
            base_port=config.port or 0,
            num_parameter_servers=config.cluster.num_parameter_servers,
            snapshot_roots=config.snapshot_roots,
            prefix=config.prefix,
            limits=config.cluster.limits,
            verbose=config.verbose,
        ),
        _say,
    )
    option = f" --dir {shlex.quote(directory)}" if directory else ""
    print(_welcome_on_hosts(control_plane, f"shoal down{option}"), flush=True)
    return 0


def _welcome_on_hosts(control_plane: ControlPlane, down: str) -> str:
    logs = "\n".join(
        f"logs on {name}: {directory}" for name, directory in control_plane.directories.items()
    )
    coordinators = ",".join(control_plane.coordinators)
    return f"""\
coordinators       {coordinators}
status pages       {",".join(control_plane.pages)}
etcd               {",".join(control_plane.etcd)}
certificates       {control_plane.certificates}, on this machine
{logs}

For commands on this machine, and for workers:
  export SHOAL_COORDINATOR={coordinators}
  export SHOAL_TLS={shlex.quote(str(control_plane.certificates))}
  shoal status
  shoal run --hosts HOST,HOST --job first your_script.py

The control plane goes on as long as more than half of its hosts run. `{down}` ends it.\
"""


def _check_ports(config: UpConfig) -> None:
    for option, port in (("--port", config.port), ("--http-port", config.http_port)):
        if port and not _is_free(port):
            raise AddressInUse(
                f"the port of {option} is taken",
                seen=f"something that listens on 127.0.0.1:{port}",
                expected="a free port",
                fix=f"Give another port, or leave {option} out.",
            )


def _check_listens(etcd: str) -> None:
    seen = []
    for endpoint in etcd.split(","):
        try:
            socket.create_connection(split_address(endpoint), CONNECTS_WITHIN_S).close()
        except OSError as error:
            seen.append(f"{endpoint}: {error.strerror or error}")
        else:
            return
    raise Unavailable(
        "the cluster does not come up without etcd",
        seen="; ".join(seen),
        expected=f"an etcd that answers at {etcd}",
        fix="Check --etcd, and that this machine can reach it.",
    )


def _await_leader(cluster: LocalCluster, etcd: str) -> None:
    try:
        check_reachable([each.grpc for each in cluster.coordinators], LEADS_WITHIN_S)
    except Unavailable as error:
        raise Unavailable(
            "the cluster does not come up: no coordinator leads",
            seen=error.seen,
            expected=f"an etcd that answers at {etcd}",
            fix="Check --etcd, and that this machine can reach it.",
        ) from error


def _say(text: str) -> None:
    print(f"shoal up: {text}", file=sys.stderr, flush=True)


def _environment(config: UpConfig) -> dict[str, str]:
    return {**os.environ, **({"SHOAL_LOG_LEVEL": "DEBUG"} if config.verbose else {})}


def _address(wanted: int | None, usual: int) -> str:
    port = usual if wanted is None else wanted
    if wanted is None and not _is_free(usual):
        port = 0
    return f"127.0.0.1:{port}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _welcome(cluster: LocalCluster, directory: Path) -> str:
    servers = ", ".join(cluster.parameter_servers) or "none"
    coordinators = ",".join(each.grpc for each in cluster.coordinators)
    pages = ",".join(each.http for each in cluster.coordinators)
    certificates = cluster.certificates
    tls = (
        "none (--insecure): every user of this machine has access"
        if certificates is None
        else f"{certificates.resolve()} (SHOAL_TLS); your commands on this machine use them,"
        " and only you can open the page"
    )
    shown = "" if pages == DEFAULT_URL else f"\n  export SHOAL_HTTP={pages}"
    return f"""\
coordinator        {coordinators}
status page        {pages}
parameter servers  {servers}
etcd               {cluster.etcd}
logs               {directory}
snapshots          {cluster.snapshots}
certificates       {tls}

In another terminal:
  export SHOAL_COORDINATOR={coordinators}{shown}
  shoal run -n 3 --job first your_script.py

A part that ends is started again. Ctrl-C stops the cluster.\
"""
