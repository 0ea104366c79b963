"""Options of a coordinator for jobs with parameters on servers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.serving.locations import AllowedRoots

_SNAPSHOTS = Group("snapshots")


def _absolute(kind: Any, tokens: Sequence[Any]) -> str | list[str]:
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
    """Default location of snapshots: a directory that all servers share, or s3://bucket/prefix, ...
    Shards that no server holds any more are restored from there."""
    every_s: Annotated[float, _option("--snapshot-every-s", "SECONDS")] = 0.0
    """Interval between snapshots of each job; a job that has not changed since its last snapshot is
    skipped. 0: only on request."""
    num_kept: Annotated[int, _option("--snapshot-keep", "N")] = 3
    """Number of complete snapshots of a job that are kept at --snapshot-url; older ones are
    removed."""
    roots: Annotated[
        Sequence[str], _option("--snapshot-root", "URL"), Parameter(converter=_absolute)
    ] = ()
    """Allow snapshots to be written and read at and below this URL as well. May be repeated. By
    default only at and below --snapshot-url."""

    def __post_init__(self) -> None:
        if not self.every_s >= 0:
            raise InvalidSpec(
                "bad --snapshot-every-s", seen=f"{self.every_s:g}", expected="0 or more"
            )
        if self.num_kept < 1:
            raise InvalidSpec("bad --snapshot-keep", seen=str(self.num_kept), expected="1 or more")
        if self.every_s and not self.url:
            raise InvalidSpec(
                "--snapshot-every-s without a location for the snapshots",
                seen=f"every {self.every_s:g} s, no URL",
                expected="a directory or URL",
                fix="Give --snapshot-url.",
            )
        AllowedRoots(self.allowed)  # raises InvalidSpec

    @property
    def allowed(self) -> Sequence[str]:
        """URLs at and below which snapshots are allowed."""
        return tuple(dict.fromkeys(each for each in (self.url, *self.roots) if each))


@dataclass(frozen=True, kw_only=True)
class ParameterOptions:
    """Options for jobs with parameters on servers."""

    copies: int = 2
    """Number of servers that hold each shard, if there are that many."""
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)
