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

from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.options import ClusterOptions

GRPC_PORT = 7700
HTTP_PORT = 7780


@dataclass(frozen=True, kw_only=True)
class UpConfig:
    """Runs etcd, a coordinator and parameter servers on this machine until Ctrl-C."""

    directory: Annotated[Path | None, Parameter(name="--dir", metavar="DIRECTORY")] = None
    """Where logs and etcd's data go. By default a temporary directory."""
    snapshot_roots: Annotated[
        Sequence[str], Parameter(name="--snapshot-root", metavar="URL", allow_repeating=True)
    ] = ()
    """Snapshots may be written and read at this URL and below it, too. Can be repeated. By default
    only in `snapshots` in --dir."""
    cluster: Annotated[ClusterOptions, Parameter(name="*")] = field(default_factory=ClusterOptions)


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
                listen=_free_or_any(GRPC_PORT),
                http=_free_or_any(HTTP_PORT),
                limits=config.cluster.limits,
                restart=RestartPolicy(),
                snapshot_roots=config.snapshot_roots,
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


def _free_or_any(port: int) -> str:
    """The usual port, so that addresses stay the same from time to time; if it is taken, any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return "127.0.0.1:0"
    return f"127.0.0.1:{port}"


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _welcome(cluster: LocalCluster, directory: Path) -> str:
    servers = ", ".join(cluster.parameter_servers) or "none"
    return f"""\
coordinator        {cluster.coordinator}
status page        {cluster.http_url}
parameter servers  {servers}
etcd               {cluster.etcd}
logs               {directory}
snapshots          {cluster.snapshots}

In another terminal:
  export SHOAL_COORDINATOR={cluster.coordinator}
  shoal run -n 3 --job first your_script.py

A part that ends is started again. Ctrl-C stops the cluster.\
"""
