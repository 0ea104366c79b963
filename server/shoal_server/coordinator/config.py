"""What a coordinator is started with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.core.limits import Limits
from shoal_server.etcd.election import DEFAULT_TTL_S
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.serving.listening import LOOPBACK, listening
from shoal_server.serving.options import (
    FLAT,
    AdvertisedAddress,
    BindAddress,
    ListenAddress,
    ReadyFile,
)
from shoal_server.snapshots.locations import AllowedRoots

_SNAPSHOTS = Group("snapshots")


def _absolute(kind: Any, tokens: Sequence[Any]) -> str | list[str]:
    """A relative path means one in the directory that the command was started in."""
    urls = [
        str(Path(each.value).resolve()) if each.value and "://" not in each.value else each.value
        for each in tokens
    ]
    return urls[-1] if kind is str else urls


def _option(name: str, metavar: str) -> Parameter:
    return Parameter(name=name, metavar=metavar, group=_SNAPSHOTS)


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy:
    url: Annotated[str, _option("--snapshot-url", "URL"), Parameter(converter=_absolute)] = ""
    """Where snapshots go that name no other place: a directory that all servers share, or
    s3://bucket/prefix, ... Shards that no server has any more come back from there."""
    every_s: Annotated[float, _option("--snapshot-every-s", "SECONDS")] = 0.0
    """Take a snapshot of every job this often. 0: only when asked to."""
    num_kept: Annotated[int, _option("--snapshot-keep", "N")] = 3
    """Complete snapshots of a job that are kept; older ones are removed."""
    roots: Annotated[
        Sequence[str], _option("--snapshot-root", "URL"), Parameter(converter=_absolute)
    ] = ()
    """Callers may have snapshots written and read at this URL and below it, too. Can be repeated.
    By default only at and below --snapshot-url."""

    def __post_init__(self) -> None:
        if not self.every_s >= 0:
            raise InvalidSpec(
                "bad --snapshot-every-s", seen=f"{self.every_s:g}", expected="0 or more"
            )
        if self.num_kept < 1:
            raise InvalidSpec("bad --snapshot-keep", seen=str(self.num_kept), expected="1 or more")
        if self.every_s and not self.url:
            raise InvalidSpec(
                "--snapshot-every-s without a place for the snapshots",
                seen=f"every {self.every_s:g} s, no URL",
                expected="a directory or URL",
                fix="Give --snapshot-url.",
            )
        AllowedRoots(self.allowed)  # raises InvalidSpec

    @property
    def allowed(self) -> Sequence[str]:
        """Every URL at and below which snapshots may lie."""
        return tuple(dict.fromkeys(each for each in (self.url, *self.roots) if each))


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Keeps the membership of jobs in etcd and serves gRPC and HTTP until SIGTERM. Run several for
    one etcd: one leads, the others take over."""

    bind: BindAddress = LOOPBACK
    listen: ListenAddress = "7700"
    http: Annotated[str, Parameter(metavar="[HOST:]PORT")] = "7780"
    """The status page and its API. A port alone is at --bind."""
    advertise: AdvertisedAddress = ""
    ready_file: ReadyFile = None
    limits: Annotated[Limits, FLAT] = field(default_factory=Limits)
    leader_lease_s: Annotated[float, Parameter(metavar="SECONDS")] = DEFAULT_TTL_S
    """A leader that hangs or is cut off is replaced after this time, and one that stood still for
    most of it steps down. A killed one is replaced at once. Less than an election within etcd takes
    (1 to 2 s) costs a leader its term for nothing; etcd grants at least 2 s by default."""
    copies: Annotated[int, Parameter(metavar="N")] = 2
    """Servers that hold each shard of parameters, as far as there are so many."""
    snapshots: Annotated[SnapshotPolicy, FLAT] = field(default_factory=SnapshotPolicy)
    etcd: Annotated[EtcdConfig, FLAT] = field(default_factory=EtcdConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "listen", listening(self.listen, self.bind))
        object.__setattr__(self, "http", listening(self.http, self.bind, "--http"))
        if self.copies < 1:
            raise InvalidSpec("bad --copies", seen=str(self.copies), expected="1 or more")
        if not self.leader_lease_s > 0:
            raise InvalidSpec(
                "bad --leader-lease-s", seen=f"{self.leader_lease_s:g}", expected="above 0"
            )
