"""`shoal snapshot`, `shoal snapshots` and `shoal restore`: save, list and load snapshots."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
from cyclopts import Parameter
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from shoal_client.connection.addresses import UsualCoordinators, usual_coordinators
from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.tls_refusals import explained
from shoal_client.host.reports import check_reachable
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import check_name
from shoal_proto.short_lists import sendable
from shoal_proto.status import from_rpc_error
from shoal_proto.terminal import printable
from shoal_proto.tls.names import COORDINATOR_NAME
from shoal_proto.tls.options import TlsOptions
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
_URL_HELP = (
    "A directory that all servers share, or s3://bucket/prefix, ... By default the coordinator's"
    " --snapshot-url."
)


def _absolute(kind: Any, tokens: Sequence[Any]) -> str:
    """Make a path absolute: servers were started in other directories."""
    text: str = tokens[-1].value
    return str(Path(text).absolute()) if text and "://" not in text else text


def _url(option: str) -> Parameter:
    return Parameter(name=option, metavar="URL", converter=_absolute, help=_URL_HELP)


@dataclass(frozen=True, kw_only=True)
class CallOptions(TlsOptions):
    """Options of the call to the coordinator, and of the printed answer."""

    given: UsualCoordinators = ()
    timeout_s: Annotated[float, Parameter(name="--timeout", metavar="SECONDS")] = 3600.0
    """Seconds to wait for the answer."""
    as_json: Annotated[bool, Parameter(name="--json")] = False
    """Print JSON."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise InvalidSpec("bad --timeout", seen=f"{self.timeout_s:g}", expected="above 0")

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses of the coordinators. Raises InvalidSpec if the user has several clusters."""
        return self.given or usual_coordinators()


@dataclass(frozen=True, kw_only=True)
class TakeConfig:
    """Saves all parameters of a job, with optimizer state and position in the data, at one moment.
    Training continues meanwhile. Shards that have not changed since the last snapshot at that URL
    are not written again."""

    job: str = field(kw_only=False)
    """Name of the job."""
    url: Annotated[str, _url("--to")] = ""
    call: Annotated[CallOptions, Parameter(name="*")] = field(default_factory=CallOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")


@dataclass(frozen=True, kw_only=True)
class SnapshotListConfig:
    """Lists the snapshots of a job."""

    job: str = field(kw_only=False)
    """Name of the job."""
    url: Annotated[str, _url("--at")] = ""
    call: Annotated[CallOptions, Parameter(name="*")] = field(default_factory=CallOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")


@dataclass(frozen=True, kw_only=True)
class RestoreConfig:
    """Loads a snapshot of a job into the parameter servers, however many there are. The job must
    have no members; workers that join afterwards continue from it."""

    job: str = field(kw_only=False)
    """Name of the job."""
    url: Annotated[str, _url("--from")] = ""
    number: Annotated[int, Parameter(metavar="N")] = 0
    """Number of the snapshot. 0: the newest."""
    call: Annotated[CallOptions, Parameter(name="*")] = field(default_factory=CallOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        if self.number < 0:
            raise InvalidSpec("bad --number", seen=str(self.number), expected="0 or more")


def take(config: TakeConfig) -> int:
    """Take a snapshot, and print its summary."""
    with _leader(config.job, config.url, config.call) as leader:
        request = TakeSnapshotRequest(job=config.job, url=config.url)
        taken: SnapshotSummary = leader(lambda stub: stub.Take, request)
    if printed(config.call, taken):
        return 0
    print(
        f"snapshot {taken.number} of job {taken.job} at {printable(taken.url)}:"
        f" {taken.num_shards} shards, {size_text(taken.num_bytes)},"
        f" of which {size_text(taken.num_new_bytes)} are new;"
        f" new pushes waited {1000 * taken.pause_s:.0f} ms"
    )
    for step in taken.partial_steps:
        print(f"incomplete: {printable(step)}")
    return 0


def show(config: SnapshotListConfig) -> int:
    """Print the snapshots."""
    with _leader(config.job, config.url, config.call) as leader:
        request = ListSnapshotsRequest(job=config.job, url=config.url)
        reply: ListSnapshotsReply = leader(lambda stub: stub.List, request)
    if printed(config.call, reply):
        return 0
    console = Console(highlight=False)
    if not reply.snapshots:
        console.print(f"no snapshots of job {config.job} at {printable(reply.url)}", markup=False)
    else:
        console.print(_table(reply))
    for what in reply.damaged:
        print(f"damaged: {printable(what)}", file=sys.stderr)
    if reply.every_s:
        console.print(f"a snapshot every {reply.every_s:g} s; the newest {reply.num_kept} are kept")
    return 0


def restore(config: RestoreConfig) -> int:
    """Load a snapshot, and print its summary."""
    with _leader(config.job, config.url, config.call) as leader:
        request = RestoreSnapshotRequest(job=config.job, url=config.url, number=config.number)
        reply: RestoreSnapshotReply = leader(lambda stub: stub.Restore, request)
    if printed(config.call, reply):
        return 0
    snapshot = reply.snapshot
    age_s = max(0.0, time.time() - snapshot.taken_unix_s)
    print(
        f"job {snapshot.job} is restored from snapshot {snapshot.number}, {age_s:.0f} s old:"
        f" {snapshot.num_shards} shards on {', '.join(reply.servers)}"
    )
    return 0


Call = Callable[[Callable[[SnapshotsStub], Any], Message], Any]


@contextmanager
def _leader(job: str, url: str, options: CallOptions) -> Iterator[Call]:
    """Yield a function that calls the leader. A failed call is not repeated: calls take long."""
    if sendable(url) != url:
        raise InvalidSpec("bad URL of a folder", seen=repr(url), expected="text in UTF-8")
    check_reachable(options.addresses, min(ANSWER_WITHIN_S, options.timeout_s))
    with closing(Coordinators(options.addresses)) as coordinators:

        def call(method: Callable[[SnapshotsStub], Any], request: Message) -> Any:
            stub = SnapshotsStub(coordinators.channel())
            try:
                return method(stub)(request, timeout=options.timeout_s)
            except grpc.RpcError as error:
                address = coordinators.current
                raise explained(from_rpc_error(error, address), address, COORDINATOR_NAME) from None

        # Find the leader, and check that the storage can be read.
        look = ListSnapshotsRequest(job=job, url=url)
        coordinators.call(
            lambda channel: SnapshotsStub(channel).List,
            look,
            timeout_s=min(ANSWER_WITHIN_S, options.timeout_s),
        )
        yield call


def printed(options: CallOptions, reply: Message) -> bool:
    """Print the reply as JSON, and return True, if the options ask for it."""
    if options.as_json:
        plain = MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        print(json.dumps(plain, indent=2))
    return options.as_json


def _table(reply: ListSnapshotsReply) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    for name in ("number", "taken", "shards", "size", "new", "incomplete"):
        table.add_column(name, justify="right")
    for each in reply.snapshots:
        table.add_row(
            str(each.number),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.taken_unix_s)),
            str(each.num_shards),
            size_text(each.num_bytes),
            size_text(each.num_new_bytes),
            str(len(each.partial_steps) or ""),
        )
    return table


def size_text(num_bytes: int) -> str:
    """Text of a number of bytes, in MiB, or in KiB if that is less than 1."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
