"""What a parameter server is started with."""

import os
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_proto.names import NAME_RULE, is_name
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.memory_limit import default_limit_bytes
from shoal_server.parameters.shard.sessions import MAX_SESSIONS
from shoal_server.serving.listening import LOOPBACK, listening
from shoal_server.serving.options import (
    FLAT,
    INTERNAL,
    AdvertisedAddress,
    BindAddress,
    ListenAddress,
    ReadyFile,
)


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    """Holds shards of parameters and applies pushed gradients, until SIGTERM."""

    bind: BindAddress = LOOPBACK
    listen: ListenAddress = "7710"
    bulk_port: Annotated[int, Parameter(metavar="PORT")] = 0
    """TCP port over which tensors travel to other machines; where it cannot be reached they go by
    gRPC. 0: any free port."""
    advertise: AdvertisedAddress = ""
    ready_file: ReadyFile = None
    server_id: Annotated[str, Parameter(name="--id", metavar="NAME")] = ""
    """Name of this server in etcd and in shard maps. By default its host and port."""
    timeouts: Annotated[PeerTimeouts, FLAT] = field(default_factory=PeerTimeouts)
    journal: Annotated[JournalConfig | None, FLAT] = None
    memory_limit_bytes: Annotated[int, Parameter(metavar="BYTES")] = field(
        default_factory=default_limit_bytes
    )
    """Limit of shards with their optimizer state, copies included, and gradients not applied yet.
    Beyond it no shard is created, no copy taken and no table grows. By default 80 % of the memory
    limit of the cgroup, else of the machine's memory."""
    max_sessions: Annotated[int, Parameter(metavar="N")] = MAX_SESSIONS
    """Sessions that a shard remembers the pushes of: as many live members as may push to it. Give
    all servers of a cluster the same."""
    drain_s: Annotated[float, Parameter(metavar="SECONDS")] = 20.0
    """On SIGTERM, hand the shards over to other servers first, for this long at most."""
    etcd: Annotated[EtcdConfig, FLAT] = field(default_factory=EtcdConfig)
    lease_ttl_s: Annotated[float, INTERNAL] = 5.0
    """A server that etcd has not heard of for so long is taken for gone: no shards are placed on
    it."""
    max_unfinished_bytes: Annotated[int, INTERNAL] = 2 * 1024**3
    """Gradients that are received but not applied yet, over all calls; beyond it, pushes are
    refused as Overloaded, and clients retry."""
    num_threads: Annotated[int, INTERNAL] = field(default_factory=lambda: os.cpu_count() or 1)
    """Shards that are worked on at the same time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "listen", listening(self.listen, self.bind))
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
        if min(self.num_threads, self.max_unfinished_bytes) < 1 or self.lease_ttl_s <= 0:
            raise InvalidSpec(
                "a limit of the parameter server is out of range",
                seen=f"num_threads {self.num_threads}, lease_ttl_s {self.lease_ttl_s},"
                f" max_unfinished_bytes {self.max_unfinished_bytes}",
                expected="all above zero",
            )
