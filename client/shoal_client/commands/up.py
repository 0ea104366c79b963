"""The client's commands; `shoal up` is here: a cluster on this machine."""

import argparse
import queue
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shoal_client.commands.drain import add as add_drain
from shoal_client.commands.jobs import add as add_rm
from shoal_client.commands.snapshots import add as add_snapshots
from shoal_client.commands.status import add as add_status
from shoal_client.demo.command import add as add_demo
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_client.local.keeper import RestartPolicy
from shoal_client.local.limits import add_limits, given_limits

BAD_ARGUMENTS = 2
GRPC_PORT = 7700
HTTP_PORT = 7780


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `shoal up`, `demo`, `status`, `why`, `drain`, `rm` and those of snapshots."""
    add_up(subparsers)
    add_demo(subparsers)
    add_status(subparsers)
    add_drain(subparsers)
    add_rm(subparsers)
    add_snapshots(subparsers)


def add_up(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "up",
        help="run a cluster on this machine until Ctrl-C",
        description="Runs etcd, a coordinator and parameter servers on this machine until Ctrl-C.",
        allow_abbrev=False,
    )
    parser.add_argument("--ps", type=int, default=2, help="parameter servers (default 2)")
    parser.add_argument(
        "--dir", type=Path, help="directory for logs and etcd's data (default: a temporary one)"
    )
    add_limits(parser)
    parser.add_argument(
        "--snapshot-root",
        action="append",
        default=[],
        metavar="URL",
        help="snapshots may be written and read at this URL and below it, too; may be given several"
        " times (default: only in `snapshots` in --dir)",
    )
    parser.set_defaults(handler=up)


def up(options: argparse.Namespace) -> int:
    """Run a cluster until Ctrl-C or SIGTERM (0), or until a part of it cannot stay up (1)."""
    if options.ps < 0:
        print(f"shoal up: bad --ps; saw {options.ps}; expected 0 or more", file=sys.stderr)
        return BAD_ARGUMENTS
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        try:
            directory = options.dir or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-up-"))
            )
            config = LocalClusterConfig(
                directory=directory,
                num_parameter_servers=options.ps,
                listen=_free_or_any(GRPC_PORT),
                http=_free_or_any(HTTP_PORT),
                limits=given_limits(options),
                restart=RestartPolicy(),
                snapshot_roots=options.snapshot_root,
            )
            cluster = stack.enter_context(LocalCluster(config, say=_say))
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
