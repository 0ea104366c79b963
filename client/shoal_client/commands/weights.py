"""`shoal weights`: series of published weights, with versions, holders and readers."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from shoal_client.commands.snapshots import CallOptions, printed, size_text
from shoal_client.connection.coordinators import Coordinators
from shoal_client.host.reports import check_reachable
from shoal_proto.errors import InvalidSpec, UnknownSeries
from shoal_proto.names import SERIES_RULE, is_name, is_series
from shoal_proto.terminal import printable
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub

Reply = TypeVar("Reply", bound=Message)

ANSWER_WITHIN_S = 10.0
DIGEST_DIGITS = 12
MAX_NUMBER = 2**63 - 1
EXPORTERS = "shoal.weights"
"""Entry points for actions that need tensors."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Shows the published weights of jobs and scripts, and acts on their versions.

    list: the series, their versions, and the readers with the version and digest that each has
    installed. pin: keeps a version until it is unpinned or the job is removed. rollback: commits a
    new version with the bytes of an older one. export: writes a version as a directory of
    safetensors files.
    """

    action: Annotated[
        Literal["list", "pin", "unpin", "rollback", "export"], Parameter(show_default=False)
    ] = field(kw_only=False)
    """Action to take."""
    series: Annotated[str, Parameter(metavar="JOB/NAME", show_default=False)] = field(
        default="", kw_only=False
    )
    """Name of the series. list: a series, or a job for all of its series; by default all."""
    number: Annotated[int, Parameter(metavar="N", show_default=False)] = field(
        default=0, kw_only=False
    )
    """pin, unpin: number of the version. export: by default the newest one."""
    to: Annotated[int, Parameter(metavar="N")] = 0
    """rollback: number of the version whose bytes become the newest version."""
    into: Annotated[str, Parameter(metavar="DIR", show_default=False)] = ""
    """export: directory to write. For SGLang it gets a directory for each version, such as
    `weight_v000057`.
    """
    format: Literal["safetensors", "sglang"] = "safetensors"
    """export: write a Hugging Face model, or the files that SGLang, slime and miles pull."""
    base: Annotated[str, Parameter(metavar="DIR", show_default=False)] = ""
    """export: directory whose config and tokenizer are copied next to the weights."""
    call: Annotated[CallOptions, Parameter(name="*")] = field(default_factory=CallOptions)

    def __post_init__(self) -> None:
        is_list = self.action == "list"
        if not is_series(self.series) and not (
            is_list and (not self.series or is_name(self.series))
        ):
            raise InvalidSpec("bad name of a series", seen=repr(self.series), expected=SERIES_RULE)
        wanted = {"pin": "a number", "unpin": "a number", "rollback": "--to"}.get(self.action, "")
        for name, value in (("a number", self.number), ("--to", self.to)):
            if self.action == "export" and name == "a number" and 0 <= value <= MAX_NUMBER:
                continue
            if (value > 0) != (wanted == name) or not 0 <= value <= MAX_NUMBER:
                raise InvalidSpec(
                    f"{self.action} takes {wanted or 'no number of a version'}",
                    seen=f"{name}: {value}",
                    expected=_USAGE[self.action],
                )
        if bool(self.into) != (self.action == "export"):
            raise InvalidSpec(
                f"{self.action} takes {'--into' if self.action == 'export' else 'no --into'}",
                seen=f"--into {self.into!r}",
                expected=_USAGE[self.action],
            )


_USAGE = {
    "list": "shoal weights list JOB/NAME",
    "pin": "shoal weights pin JOB/NAME N",
    "unpin": "shoal weights unpin JOB/NAME N",
    "rollback": "shoal weights rollback JOB/NAME --to N",
    "export": "shoal weights export JOB/NAME --into DIR",
}


def weights(config: WeightsConfig) -> int:
    """Carry out the action and print its result. Returns 1 if `list` shows a reader with wrong
    bytes."""
    options = config.call
    check_reachable(options.addresses, min(ANSWER_WITHIN_S, options.timeout_s))
    if config.action == "export":
        return _export(config)
    with closing(Coordinators(options.addresses)) as coordinators:
        if config.action == "list":
            return _list(config, coordinators)
        if config.action == "rollback":
            request = pb.RollbackRequest(series=config.series, to=config.to)
            version: pb.VersionRecord = _call(
                config, coordinators, lambda stub: stub.Rollback, request
            )
            if not printed(options, version):
                print(
                    f"version {version.number} of {config.series} has the bytes of version"
                    f" {config.to}"
                )
            return 0
        pins = config.action == "pin"
        pin = pb.PinVersionRequest(series=config.series, number=config.number, unpin=not pins)
        view: pb.SeriesView = _call(config, coordinators, lambda stub: stub.Pin, pin)
        if not printed(options, view):
            kept = (
                "is kept until it is unpinned or the job is removed"
                if pins
                else "is kept like any other"
            )
            print(f"version {config.number} of {config.series} {kept}")
        return 0


def _export(config: WeightsConfig) -> int:
    found = [each for each in entry_points(group=EXPORTERS) if each.name == config.action]
    if not found:
        raise InvalidSpec(
            "weights cannot be exported by this installation",
            seen="no package that has tensors",
            expected="pip install 'shoal[worker]'",
        )
    path = found[0].load()(
        config.series,
        config.into,
        coordinator=",".join(config.call.addresses),
        version=config.number or None,
        format=config.format,
        base=config.base or None,
    )
    print(f"{config.series} is written to {path}")
    return 0


def _list(config: WeightsConfig, coordinators: Coordinators) -> int:
    job, _, name = config.series.partition("/")
    reply: pb.ListSeriesReply = _call(
        config, coordinators, lambda stub: stub.List, pb.ListSeriesRequest(job=job)
    )
    if name:
        found = [each for each in reply.series if each.series == config.series]
        if not found:
            raise UnknownSeries(
                f"there is no series {config.series}",
                seen=", ".join(each.series for each in reply.series) or f"none of job {job}",
                expected="a published series",
            )
        reply = pb.ListSeriesReply(series=found)
    if not printed(config.call, reply):
        console = Console(highlight=False)
        if not reply.series:
            console.print("no published weights")
        for view in reply.series:
            _show(console, view)
    return int(any(reader.differs for view in reply.series for reader in view.readers))


def _show(console: Console, view: pb.SeriesView) -> None:
    lost = f", lost: {', '.join(map(str, view.lost))}" if view.lost else ""
    console.print(
        f"{view.series}: version {view.head}, by {printable(view.publisher)}, keeps"
        f" {view.options.keep} in {view.options.copies} copies{lost}",
        markup=False,
    )
    if view.versions:
        console.print(_versions(view))
    if view.readers:
        console.print(_readers(view))
    for reader in view.readers:
        if reader.differs:
            console.print(
                f"{printable(reader.id)} serves other bytes than version {reader.installed} has:"
                f" digest {_digest(reader.installed_digest)}",
                markup=False,
                style="bold red",
            )


def _versions(view: pb.SeriesView) -> Table:
    leases: dict[int, int] = {}
    served: dict[int, int] = {}
    for reader in view.readers:
        served[reader.installed] = served.get(reader.installed, 0) + 1
        for number in reader.leased:
            leases[number] = leases.get(number, 0) + 1
    table = _table("version", "step", "age", "size", "copies", "readers", "leases", "digest", "")
    for version in view.versions:
        marks = {
            "pinned": version.pinned,
            "durable": version.durable,
            f"bytes of {version.rolled_back_to}": version.rolled_back_to > 0,
        }
        table.add_row(
            str(version.number),
            str(version.step),
            _age(version.created_unix_s),
            size_text(sum(segment.num_bytes for segment in version.segments)),
            str(min((len(segment.holders) for segment in version.segments), default=0)),
            str(served.get(version.number, "")),
            str(leases.get(version.number, "")),
            _digest(version.digest),
            ", ".join(mark for mark, holds in marks.items() if holds),
        )
    return table


def _readers(view: pb.SeriesView) -> Table:
    table = _table("reader", "version", "behind", "digest", "seen", "fetch")
    for reader in view.readers:
        size = size_text(reader.fetch_bytes)
        fetch = f"{size} in {reader.fetch_s:.2f} s" if reader.fetch_s else ""
        table.add_row(
            printable(reader.id),
            str(reader.installed or ""),
            str(view.head - reader.installed) if reader.installed else "",
            _digest(reader.installed_digest),
            _age(reader.seen_unix_s),
            fetch,
        )
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="left" if name in ("reader", "digest", "") else "right")
    return table


def _digest(digest: bytes) -> str:
    return digest.hex()[:DIGEST_DIGITS]


def _age(unix_s: float) -> str:
    return f"{max(time.time() - unix_s, 0.0):.0f} s"


Method = Callable[[WeightSeriesStub], Callable[..., Any]]


def _call(config: WeightsConfig, coordinators: Coordinators, method: Method, request: Any) -> Any:
    timeout_s = min(ANSWER_WITHIN_S, config.call.timeout_s)
    return coordinators.call(
        lambda channel: method(WeightSeriesStub(channel)), request, timeout_s=timeout_s
    )
