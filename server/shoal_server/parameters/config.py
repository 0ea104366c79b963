"""Configuration of a parameter server."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_proto.names import NAME_RULE, is_name
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.shard.sessions import MAX_SESSIONS
from shoal_server.serving.admission import descriptors
from shoal_server.serving.admission.config import CallLimits
from shoal_server.serving.listening import LOOPBACK, listen_address
from shoal_server.serving.options import (
    FLAT,
    INTERNAL,
    AdvertisedAddress,
    ListenAddress,
    MetricsAddress,
    ParameterServerServing,
    ReadyFile,
)

MEMORY_SHARE = 0.8
"""Fraction of the memory that is the limit. The rest is for the interpreter, and for messages and
images in transit."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def default_limit_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """80 % of the lowest memory limit: the machine's memory, or the limit of this process' cgroup
    (version 1 or 2) or of an ancestor.

    `cgroups`: the folder where cgroups are mounted. `own`: a file like /proc/self/cgroup.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(MEMORY_SHARE * min([machine_bytes, *_cgroup_limits(cgroups, own)]))


def _cgroup_limits(cgroups: Path, own: Path) -> Iterator[int]:
    for folder, file in _limit_files(cgroups, own):
        try:
            text = (folder / file).read_text().strip()
        except OSError:
            # The root cgroup has no such file; in a container, the path may be the host's.
            continue
        if text.isdigit():
            yield int(text)


def _limit_files(cgroups: Path, own: Path) -> Iterator[tuple[Path, str]]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = Path(path.lstrip("/"))
        if not controllers:
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in (inner, *inner.parents):
            yield root / folder, file


@dataclass(frozen=True, kw_only=True)
class WorkLimits:
    """Bounds on concurrent work of a parameter server."""

    calls: Annotated[CallLimits, FLAT] = field(default_factory=CallLimits)
    max_bulk_connections: Annotated[int, Parameter(metavar="N")] = 4096
    """Maximum number of connections for tensors, at most a quarter of the descriptors that this
    process may have. A client beyond it uses gRPC, over which published weights cannot be sent."""
    max_unfinished_bytes: Annotated[int, Parameter(metavar="BYTES")] = 2 * 1024**3
    """Maximum bytes of gradients that are received but not applied yet, over all calls. Above this,
    pushes are refused as Overloaded, and clients retry. A single push to one shard may be larger,
    if no other is in progress."""
    num_threads: Annotated[int, INTERNAL] = field(default_factory=lambda: os.cpu_count() or 1)
    """Number of threads for work on large shards, each for one shard at a time."""

    def __post_init__(self) -> None:
        for name in ("max_bulk_connections", "max_unfinished_bytes", "num_threads"):
            value = getattr(self, name)
            if value < 1:
                option = f"--{name.replace('_', '-')}"
                raise InvalidSpec(f"bad {option}", seen=str(value), expected="above 0")

    @property
    def most_bulk_connections(self) -> int:
        """`max_bulk_connections`, or fewer if this process has too few descriptors."""
        return min(self.max_bulk_connections, descriptors.descriptors_for_callers(0.25))


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Holds shards of parameters and applies pushed gradients, until SIGTERM or SIGINT."""

    reach: Annotated[ParameterServerServing, FLAT] = field(default_factory=ParameterServerServing)
    listen: ListenAddress = "7710"
    bulk_port: Annotated[int, Parameter(metavar="PORT")] = 0
    """TCP port for tensors to and from other machines. If it cannot be reached, tensors go over
    gRPC, and published weights cannot be sent. 0: any free port."""
    advertise: AdvertisedAddress = ""
    ready_file: ReadyFile = None
    metrics: MetricsAddress = ""
    server_id: Annotated[str, Parameter(name="--id", metavar="NAME")] = ""
    """Name of this server in etcd and in shard maps. By default its host and port."""
    timeouts: Annotated[PeerTimeouts, FLAT] = field(default_factory=PeerTimeouts)
    journal: Annotated[JournalConfig | None, FLAT] = None
    weights_directory: Annotated[
        Path | None, Parameter(name="--weights-directory", metavar="DIRECTORY")
    ] = None
    """Also keep published weights in this directory, on a disk that honours `fsync`: needed for
    durable versions, which outlast the end of all servers at once. Each server needs a directory of
    its own."""
    memory_limit_bytes: Annotated[int, Parameter(metavar="BYTES")] = field(
        default_factory=default_limit_bytes
    )
    """Limit for shards with their optimizer state, copies included, for gradients not applied yet
    and for published weights. Beyond it, the server creates no shard, takes no copy, lets no table
    grow and accepts no published weights. By default 80 % of the cgroup's memory limit, or of the
    machine's memory."""
    max_sessions: Annotated[int, Parameter(metavar="N")] = MAX_SESSIONS
    """Number of sessions whose pushes a shard remembers: at least the number of live members that
    push to it. Must be the same on all servers of a cluster."""
    drain_s: Annotated[float, Parameter(metavar="SECONDS")] = 20.0
    """Longest time, on SIGTERM or SIGINT, for handing shards and published weights over to
    other servers."""
    etcd: Annotated[EtcdConfig, FLAT] = field(default_factory=EtcdConfig)
    work: Annotated[WorkLimits, FLAT] = field(default_factory=WorkLimits)
    lease_ttl_s: Annotated[float, INTERNAL] = 5.0
    """Time to live of the registration's lease: no shards are placed on a server that has not
    renewed it for this long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "listen", listen_address(self.listen, self.reach.bind))
        listens = {"gRPC": self.listen}
        if self.metrics:
            address = listen_address(self.metrics, LOOPBACK, "--metrics")
            object.__setattr__(self, "metrics", address)
            listens["metrics"] = address
        self.reach.check(listens)
        if not 0 <= self.bulk_port < 65536:
            raise InvalidSpec("bad --bulk-port", seen=str(self.bulk_port), expected="0 to 65535")
        if self.server_id and not is_name(self.server_id):
            raise InvalidSpec("bad --id", seen=repr(self.server_id), expected=NAME_RULE)
        if self.memory_limit_bytes < 1:
            raise InvalidSpec(
                "bad --memory-limit-bytes", seen=str(self.memory_limit_bytes), expected="above 0"
            )
        if not self.drain_s >= 0:
            raise InvalidSpec("bad --drain-s", seen=f"{self.drain_s:g}", expected="0 or more")
        if self.max_sessions < 1:
            raise InvalidSpec("bad --max-sessions", seen=str(self.max_sessions), expected="above 0")
        if self.lease_ttl_s <= 0:
            raise InvalidSpec("bad lease_ttl_s", seen=f"{self.lease_ttl_s:g}", expected="above 0")
