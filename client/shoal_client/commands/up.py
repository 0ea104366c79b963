"""`shoal up`: a cluster on this machine, until Ctrl-C."""

import queue
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

from cyclopts import Parameter

from shoal_client.commands.status import DEFAULT_URL
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.options import ClusterOptions
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import check_prefix

GRPC_PORT = 7700
HTTP_PORT = 7780


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Runs etcd, coordinators and parameter servers on this machine until Ctrl-C. What ends is
    started again."""

    directory: Annotated[Path | None, Parameter(name="--dir", metavar="DIRECTORY")] = None
    """Where logs and etcd's data go. By default a temporary directory."""
    port: Annotated[int | None, Parameter(metavar="PORT")] = None
    """Port of the coordinator; 0 takes any free one. By default 7700, or any if that is taken."""
    http_port: Annotated[int | None, Parameter(metavar="PORT")] = None
    """Port of the status page and its API. By default 7780, likewise."""
    snapshot_roots: Annotated[
        Sequence[str], Parameter(name="--snapshot-root", metavar="URL", allow_repeating=True)
    ] = ()
    """Snapshots may be written and read at this URL and below it, too. Can be repeated. By default
    only in `snapshots` in --dir."""
    num_coordinators: Annotated[int, Parameter(name="--coordinators", metavar="N")] = 1
    """Coordinators: one leads, and if it dies another takes over at once."""
    etcd: Annotated[str, Parameter(metavar="HOST:PORT,...")] = ""
    """An etcd that is there already. By default one is started."""
    prefix: Annotated[str, Parameter(metavar="/NAME")] = ""
    """What every key of this cluster in etcd begins with, so that several share an etcd."""
    cluster: Annotated[ClusterOptions, Parameter(name="*")] = field(default_factory=ClusterOptions)

    def __post_init__(self) -> None:
        for option, port in (("--port", self.port), ("--http-port", self.http_port)):
            if port is not None and not 0 <= port < 2**16:
                raise InvalidSpec(f"bad {option}", seen=str(port), expected="0 to 65535")
        check_prefix(self.prefix)
        if self.num_coordinators < 1:
            raise InvalidSpec(
                "bad --coordinators", seen=str(self.num_coordinators), expected="1 or more"
            )


def up(config: UpConfig) -> int:
    """Run a cluster until Ctrl-C or SIGTERM (0), or until a part of it cannot stay up (1)."""
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        try:
            directory = config.directory or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-up-"))
            )
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
            )
            cluster = stack.enter_context(LocalCluster(started, say=_say))
            cluster.when_given_up(ended.put)
            print(_welcome(cluster, directory), flush=True)
            _say(f"stopping the cluster: {ended.get()}")
            return 1
        except KeyboardInterrupt:
            print("stopping", flush=True)
            return 0


def _say(text: str) -> None:
    print(f"shoal up: {text}", file=sys.stderr, flush=True)


def _address(wanted: int | None, usual: int) -> str:
    """The port that was asked for, or the usual one, so that addresses stay the same from time to
    time; if that is taken, any."""
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


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _welcome(cluster: LocalCluster, directory: Path) -> str:
    servers = ", ".join(cluster.parameter_servers) or "none"
    coordinators = ",".join(each.grpc for each in cluster.coordinators)
    pages = ",".join(each.http for each in cluster.coordinators)
    shown = "" if pages == DEFAULT_URL else f"\n  export SHOAL_HTTP={pages}"
    return f"""\
coordinator        {coordinators}
status page        {pages}
parameter servers  {servers}
etcd               {cluster.etcd}
logs               {directory}
snapshots          {cluster.snapshots}

In another terminal:
  export SHOAL_COORDINATOR={coordinators}{shown}
  shoal run -n 3 --job first your_script.py

A part that ends is started again. Ctrl-C stops the cluster.\
"""
