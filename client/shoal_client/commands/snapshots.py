"""`shoal snapshot`, `shoal snapshots` and `shoal restore`: a job's parameters as of one moment."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from shoal_client.commands.drain import DEFAULT_COORDINATOR
from shoal_client.connection.coordinators import Coordinators
from shoal_client.host.reports import parse_coordinators
from shoal_proto.errors import InvalidSpec
from shoal_proto.status import from_rpc_error
from shoal_proto.v1.snapshots_pb2 import (
    ListSnapshotsReply,
    ListSnapshotsRequest,
    RestoreSnapshotReply,
    RestoreSnapshotRequest,
    SnapshotSummary,
    TakeSnapshotRequest,
)
from shoal_proto.v1.snapshots_pb2_grpc import SnapshotsStub

ANSWER_WITHIN_S = 10.0
DEFAULT_TIMEOUT_S = 3600.0

Subparsers = argparse._SubParsersAction


def add(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Add `shoal snapshot`, `shoal snapshots` and `shoal restore`."""
    take = subparsers.add_parser(
        "snapshot",
        help="keep a job's parameters as they are now",
        description="Writes all parameters of a job, with optimizer state and data cursor, as of"
        " one moment. Training goes on meanwhile. Shards that did not change since the last"
        " snapshot there are not written again.",
        allow_abbrev=False,
    )
    _add_common(take, "--to")
    take.set_defaults(handler=_take)
    listing = subparsers.add_parser("snapshots", help="the snapshots of a job", allow_abbrev=False)
    _add_common(listing, "--at")
    listing.set_defaults(handler=_list)
    restore = subparsers.add_parser(
        "restore",
        help="give the parameter servers what a snapshot holds",
        description="Loads a snapshot of a job into the parameter servers that are there, however"
        " many. The job must have no members; those that join afterwards go on from it.",
        allow_abbrev=False,
    )
    _add_common(restore, "--from")
    restore.add_argument(
        "--number", type=int, default=0, metavar="N", help="which one (default: the newest)"
    )
    restore.set_defaults(handler=_restore)


def _add_common(parser: argparse.ArgumentParser, url: str) -> None:
    option = parser.add_argument
    option("job", metavar="JOB", help="name of the job")
    option(
        url,
        dest="url",
        default="",
        metavar="URL",
        help="a directory that all servers share, or s3://bucket/prefix, ... (default: that of the"
        " coordinator's --snapshot-url)",
    )
    option(
        "--coordinator",
        metavar="HOST:PORT,...",
        default=os.environ.get("SHOAL_COORDINATOR") or DEFAULT_COORDINATOR,
        help=f"default: $SHOAL_COORDINATOR, else {DEFAULT_COORDINATOR}",
    )
    option(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="give up after so long (default %(default)g)",
    )
    option("--json", action="store_true", help="print JSON")


def _take(options: argparse.Namespace) -> int:
    with _leader(options) as leader:
        request = TakeSnapshotRequest(job=options.job, url=_url(options.url))
        taken: SnapshotSummary = leader(lambda stub: stub.Take, request)
    if _printed(options, taken):
        return 0
    print(
        f"snapshot {taken.number} of job {taken.job} at {taken.url}: {taken.num_shards} shards,"
        f" {_mib(taken.num_bytes)}, of which {_mib(taken.num_new_bytes)} are new;"
        f" new pushes waited {1000 * taken.pause_s:.0f} ms"
    )
    for step in taken.partial_steps:
        print(f"not whole: {step}")
    return 0


def _list(options: argparse.Namespace) -> int:
    with _leader(options) as leader:
        request = ListSnapshotsRequest(job=options.job, url=_url(options.url))
        reply: ListSnapshotsReply = leader(lambda stub: stub.List, request)
    if _printed(options, reply):
        return 0
    console = Console(highlight=False)
    if not reply.snapshots:
        console.print(f"no snapshots of job {options.job} at {reply.url}", markup=False)
    else:
        console.print(_table(reply))
    for what in reply.damaged:
        print(f"damaged: {what}", file=sys.stderr)
    if reply.every_s:
        console.print(f"one every {reply.every_s:g} s, {reply.num_kept} are kept")
    return 0


def _restore(options: argparse.Namespace) -> int:
    with _leader(options) as leader:
        request = RestoreSnapshotRequest(
            job=options.job, url=_url(options.url), number=options.number
        )
        reply: RestoreSnapshotReply = leader(lambda stub: stub.Restore, request)
    if _printed(options, reply):
        return 0
    snapshot = reply.snapshot
    age_s = time.time() - snapshot.taken_unix_s
    print(
        f"job {snapshot.job} is as of snapshot {snapshot.number}, {age_s:.0f} s ago:"
        f" {snapshot.num_shards} shards on {', '.join(reply.servers)}"
    )
    return 0


Call = Callable[[Callable[[SnapshotsStub], Any], Message], Any]


@contextmanager
def _leader(options: argparse.Namespace) -> Iterator[Call]:
    """Calls to the coordinator that leads. Each is made once: what it does takes long, and what
    fails is told at once."""
    if not options.timeout > 0:
        raise InvalidSpec("bad --timeout", seen=f"{options.timeout:g}", expected="above 0")
    coordinators = Coordinators(parse_coordinators(options.coordinator))

    def call(method: Callable[[SnapshotsStub], Any], request: Message) -> Any:
        stub = SnapshotsStub(coordinators.channel())
        try:
            return method(stub)(request, timeout=options.timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error, coordinators.current) from None

    try:
        # Finds the leader, and sees that the storage can be read.
        look = ListSnapshotsRequest(job=options.job, url=_url(options.url))
        coordinators.call(
            lambda channel: SnapshotsStub(channel).List,
            look,
            timeout_s=min(ANSWER_WITHIN_S, options.timeout),
        )
        yield call
    finally:
        coordinators.close()


def _url(text: str) -> str:
    """A path means the same wherever the servers were started."""
    return str(Path(text).absolute()) if text and "://" not in text else text


def _printed(options: argparse.Namespace, reply: Message) -> bool:
    if options.json:
        plain = MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(json.dumps(plain, indent=2))
    return bool(options.json)


def _table(reply: ListSnapshotsReply) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    for name in ("number", "taken", "shards", "size", "new", "not whole"):
        table.add_column(name, justify="right")
    for each in reply.snapshots:
        table.add_row(
            str(each.number),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.taken_unix_s)),
            str(each.num_shards),
            _mib(each.num_bytes),
            _mib(each.num_new_bytes),
            str(len(each.partial_steps) or ""),
        )
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
