"""`shoal coordinator`, `shoal ps` and `shoal config`."""

import argparse
import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from shoal_proto.errors import InvalidSpec, ShoalError
from shoal_server.core.limits import Limits
from shoal_server.etcd.remote.config import EtcdConfig, parse_endpoints
from shoal_server.serving.listening import LOOPBACK, listening

BAD_ARGUMENTS = 2
DEFAULT_ETCD = "127.0.0.1:2379"

Subparsers = argparse._SubParsersAction  # its only public name is what add_subparsers returns


def add(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add `shoal coordinator`, `shoal ps` and `shoal config`."""
    _add_coordinator(subparsers)
    _add_parameter_server(subparsers)
    _add_config(subparsers)


def _add_coordinator(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "coordinator",
        help="serve membership, rendezvous and the status page",
        description="Keeps the membership of jobs in etcd and serves gRPC and HTTP until SIGTERM."
        " Run several for one etcd: one leads, the others take over.",
        allow_abbrev=False,
    )
    _add_serving(parser, port="7700")
    option = parser.add_argument
    option(
        "--http",
        default="7780",
        metavar="[HOST:]PORT",
        help="the status page and its API (default %(default)s, at --bind)",
    )
    _add_limits(parser)
    option(
        "--leader-lease-s",
        type=float,
        default=5.0,
        help="a leader that hangs or is cut off is succeeded after so long, a killed one at once"
        " (default %(default)s, at least 2)",
    )
    option(
        "--copies",
        type=int,
        default=2,
        help="servers that hold each shard of parameters (default %(default)s, as far as there"
        " are so many)",
    )
    _add_snapshots(parser)
    parser.set_defaults(handler=coordinator)


def _add_snapshots(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("snapshots").add_argument
    option(
        "--snapshot-url",
        default="",
        metavar="URL",
        help="where snapshots go: a directory that all servers share, or s3://bucket/prefix, ...;"
        " shards that no server has any more come back from there",
    )
    option(
        "--snapshot-root",
        action="append",
        default=[],
        metavar="URL",
        help="callers may have snapshots written and read at this URL and below it, too; may be"
        " given several times (default: only at and below --snapshot-url)",
    )
    option(
        "--snapshot-every-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="take one of every job so often (default: only when asked to)",
    )
    option(
        "--snapshot-keep",
        type=int,
        default=3,
        metavar="N",
        help="complete ones of a job that are kept (default %(default)s)",
    )


def _add_parameter_server(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "ps",
        help="serve parameter shards",
        description="Holds shards of parameters and applies pushed gradients, until SIGTERM.",
        allow_abbrev=False,
    )
    _add_serving(parser, port="7710")
    option = parser.add_argument
    option("--id", help="name of this server (default: host and port)")
    option(
        "--bulk-port",
        type=int,
        default=0,
        metavar="PORT",
        help="TCP port over which tensors travel to other machines; where it cannot be reached they"
        " go by gRPC (default: any free one)",
    )
    option(
        "--silence-s",
        type=float,
        default=2.0,
        help="servers that hear nothing of each other for so long go on without each other"
        " (default %(default)s); one that is killed is noticed at once",
    )
    option(
        "--journal",
        type=Path,
        metavar="DIRECTORY",
        help="keep applied pushes on this disk too: for pushes that are to be acknowledged as"
        " durable, and to go on after every server died at once",
    )
    option(
        "--memory-limit-bytes",
        type=int,
        metavar="BYTES",
        help="of shards with their optimizer state, copies included, and gradients not applied"
        " yet; beyond it no shard is created, no copy taken and no table grows (default: 80%% of"
        " the memory limit of the cgroup, else of the machine's memory)",
    )
    option(
        "--drain-s",
        type=float,
        default=20.0,
        help="on SIGTERM, hand the shards over to other servers first, for so long at most"
        " (default %(default)s)",
    )
    parser.set_defaults(handler=parameter_server)


def _add_config(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "config",
        help="every time limit that follows from the few that are chosen",
        description="Prints the time limits that a coordinator with these numbers works by,"
        " what each is for, and the order in which they must be. Starts nothing.",
        allow_abbrev=False,
    )
    _add_limits(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(handler=config)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "--heartbeat-s",
        type=float,
        default=0.5,
        help="seconds between heartbeats (default %(default)s); detection times follow from it",
    )
    option(
        "--join-s",
        type=float,
        default=120.0,
        help="longest wait of a member for a generation, in seconds (default %(default)s);"
        " the other limits follow from it",
    )
    option(
        "--collective-s",
        type=float,
        default=0.0,
        help="longest wait in one collective before it is taken for hung, in seconds (default: a"
        " quarter of --join-s)",
    )


def _add_serving(parser: argparse.ArgumentParser, port: str) -> None:
    option = parser.add_argument
    option(
        "--bind",
        default=LOOPBACK,
        metavar="ADDRESS",
        help="serve every port at this address; 0.0.0.0: at all of this machine's. There is no TLS"
        " and no password: whoever reaches the ports can read parameters and end jobs (default"
        " %(default)s)",
    )
    option(
        "--listen",
        default=port,
        metavar="[HOST:]PORT",
        help="gRPC (default %(default)s, at --bind)",
    )
    option(
        "--advertise",
        default="",
        metavar="HOST[:PORT]",
        help="address that others connect to (default: what is listened on; where that is every"
        " address, this machine's name)",
    )
    option("--ready-file", type=Path, help="written once it serves: JSON with its addresses")
    etcd = parser.add_argument_group("etcd")
    etcd.add_argument(
        "--etcd",
        default=os.environ.get("SHOAL_ETCD", DEFAULT_ETCD),
        metavar="HOST:PORT,...",
        help="endpoints of one cluster (default: $SHOAL_ETCD or %(default)s)",
    )
    etcd.add_argument("--etcd-user", default="")
    etcd.add_argument("--etcd-password-file", type=Path)
    etcd.add_argument("--etcd-ca", type=Path, help="PEM file; turns TLS on")
    etcd.add_argument("--etcd-cert", type=Path, help="PEM file of the client certificate")
    etcd.add_argument("--etcd-key", type=Path, help="PEM file of its key")


def etcd_config(options: argparse.Namespace) -> EtcdConfig:
    """The etcd settings of the options. Raises InvalidSpec."""
    password = ""
    if options.etcd_password_file is not None:
        password = _read(options.etcd_password_file).strip()
    return EtcdConfig(
        endpoints=parse_endpoints(options.etcd),
        user=options.etcd_user,
        password=password,
        ca_file=options.etcd_ca,
        cert_file=options.etcd_cert,
        key_file=options.etcd_key,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise InvalidSpec(
            "the etcd password file cannot be read", seen=str(error), expected="a readable file"
        ) from error


def limits_of(options: argparse.Namespace) -> Limits:
    """The time limits of the options. Raises ValueError for numbers out of order."""
    return Limits(
        heartbeat_s=options.heartbeat_s,
        join_s=options.join_s,
        collective_s=options.collective_s,
    )


def coordinator(options: argparse.Namespace) -> int:
    """Serve as a coordinator until SIGTERM or SIGINT."""
    from shoal_server.coordinator.config import (  # noqa: PLC0415
        CoordinatorConfig,
        SnapshotPolicy,
    )
    from shoal_server.coordinator.process import serve  # noqa: PLC0415

    try:
        config = CoordinatorConfig(
            etcd=etcd_config(options),
            listen=listening(options.listen, options.bind),
            http=listening(options.http, options.bind),
            advertise=options.advertise,
            limits=limits_of(options),
            leader_lease_s=options.leader_lease_s,
            copies=options.copies,
            snapshots=SnapshotPolicy(
                url=_absolute(options.snapshot_url),
                roots=[_absolute(url) for url in options.snapshot_root],
                every_s=options.snapshot_every_s,
                num_kept=options.snapshot_keep,
            ),
            ready_file=options.ready_file,
        )
    except ValueError as error:
        return _bad_arguments("coordinator", error)
    return _run("coordinator", serve(config))


def _absolute(url: str) -> str:
    """A relative path means one in the directory that this command was started in."""
    return str(Path(url).resolve()) if url and "://" not in url else url


def config(options: argparse.Namespace) -> int:
    """Print the time limits; 2 for numbers that a coordinator would not start with."""
    from shoal_server.config_command import show  # noqa: PLC0415

    try:
        limits = limits_of(options)
    except ValueError as error:
        return _bad_arguments("config", error)
    show(limits, as_json=options.json)
    return 0


def parameter_server(options: argparse.Namespace) -> int:
    """Serve shards until SIGTERM or SIGINT."""
    if importlib.util.find_spec("torch") is None:
        print(
            "shoal ps: torch is not installed; expected the extra 'server'."
            " Run: pip install 'shoal[server]'",
            file=sys.stderr,
        )
        return 1
    from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts  # noqa: PLC0415
    from shoal_server.parameters.config import ParameterServerConfig  # noqa: PLC0415
    from shoal_server.parameters.journal.config import JournalConfig  # noqa: PLC0415
    from shoal_server.parameters.process import serve  # noqa: PLC0415

    try:
        config = ParameterServerConfig(
            etcd=etcd_config(options),
            listen=listening(options.listen, options.bind),
            bulk_port=options.bulk_port,
            advertise=options.advertise,
            server_id=options.id or "",
            ready_file=options.ready_file,
            timeouts=PeerTimeouts(silence_s=options.silence_s),
            drain_s=options.drain_s,
            journal=JournalConfig(directory=options.journal) if options.journal else None,
        )
        if options.memory_limit_bytes is not None:
            config = replace(config, memory_limit_bytes=options.memory_limit_bytes)
    except ValueError as error:
        return _bad_arguments("ps", error)
    return _run("ps", serve(config))


def _bad_arguments(command: str, error: ValueError) -> int:
    print(f"shoal {command}: {error}", file=sys.stderr)
    return BAD_ARGUMENTS


def _run(command: str, work: Coroutine[Any, Any, None]) -> int:
    _configure_logging()
    try:
        asyncio.run(work)
    except ShoalError as error:
        print(f"shoal {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _configure_logging() -> None:
    """Lines of JSON for machines, readable ones for a terminal; SHOAL_LOG_LEVEL sets how many."""
    level = logging.getLevelName(os.environ.get("SHOAL_LOG_LEVEL", "INFO").upper())
    terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
