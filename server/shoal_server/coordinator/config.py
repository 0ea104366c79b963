"""What a coordinator is started with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal_proto.errors import InvalidSpec
from shoal_server.core.limits import Limits
from shoal_server.etcd.election import DEFAULT_TTL_S
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.serving.listening import split_address
from shoal_server.snapshots.locations import AllowedRoots


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy:
    url: str = ""
    """Where snapshots go that name no other place; every server reaches it. Empty: nowhere."""
    every_s: float = 0.0
    """Seconds between two snapshots of a job; 0: none is taken without being asked for."""
    num_kept: int = 3
    """Complete snapshots of a job that stay there; older ones are removed."""
    roots: Sequence[str] = ()
    """URLs at and below which callers may name other places; without any, `url` is the only one."""

    def __post_init__(self) -> None:
        if self.every_s < 0 or self.num_kept < 1:
            raise InvalidSpec(
                "the snapshot policy is out of range",
                seen=f"every {self.every_s:g} s, {self.num_kept} kept",
                expected="0 s or more, and at least one kept",
            )
        if self.every_s and not self.url:
            raise InvalidSpec(
                "snapshots are to be taken, but nowhere to be put",
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
    etcd: EtcdConfig
    listen: str = "127.0.0.1:7700"
    """host:port of gRPC; port 0 takes a free one."""
    http: str = "127.0.0.1:7780"
    """host:port of the status endpoint; port 0 takes a free one."""
    advertise: str = ""
    """HOST or HOST:PORT that workers and other coordinators reach this one at. Empty: the host
    listened on, or this machine's name where that is all of its addresses."""
    limits: Limits = field(default_factory=Limits)
    leader_lease_s: float = DEFAULT_TTL_S
    """A leader that hangs or is cut off is succeeded after so long, and one that stood still for
    most of it steps down. A killed one is succeeded at once, however long this is. Less than an
    election within etcd takes (1 to 2 s) costs a leader its term for nothing. etcd grants at least
    2 s with its default timings."""
    copies: int = 2
    """Servers that hold each shard of parameters, as far as there are so many."""
    snapshots: SnapshotPolicy = field(default_factory=SnapshotPolicy)
    """Where snapshots go, and how often one is taken."""
    ready_file: Path | None = None

    def __post_init__(self) -> None:
        split_address(self.listen)
        split_address(self.http)
        if self.copies < 1:
            raise InvalidSpec(
                "the number of copies is out of range", seen=str(self.copies), expected="1 or more"
            )
