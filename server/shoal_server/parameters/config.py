"""What a parameter server is started with."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from shoal_proto.errors import InvalidSpec
from shoal_proto.names import NAME_RULE, is_name
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.parameters.cluster.peer_timeouts import PeerTimeouts
from shoal_server.parameters.journal.config import JournalConfig
from shoal_server.parameters.memory_limit import default_limit_bytes
from shoal_server.serving.listening import split_address


@dataclass(frozen=True, kw_only=True)
class ParameterServerConfig:
    etcd: EtcdConfig
    listen: str = "127.0.0.1:7710"
    """host:port of the gRPC service; port 0 takes a free one."""
    bulk_port: int = 0
    """TCP port of the bulk transport, on the same host; 0 takes a free one."""
    advertise: str = ""
    """HOST or HOST:PORT under which workers reach this server. Empty: the host listened on, or
    this machine's name where that is all of its addresses."""
    server_id: str = ""
    """Names the server in etcd and in shard maps. Empty: its address."""
    ready_file: Path | None = None
    """Written as JSON once the server serves: pid and address."""
    lease_ttl_s: float = 5.0
    """A server that etcd has not heard of for so long is taken for gone: no shards are placed on
    it."""
    journal: JournalConfig | None = None
    """Where pushes are kept on disk, for those that are to be acknowledged as durable."""
    drain_s: float = 20.0
    """A server that is told to stop hands its shards over first, for so long at most."""
    max_unfinished_bytes: int = 2 * 1024**3
    """Gradients that are received but not applied yet, over all calls; beyond it, pushes are
    refused as Overloaded, and clients retry."""
    memory_limit_bytes: int = field(default_factory=default_limit_bytes)
    """Shards with their optimizer state, copies included, and gradients not applied yet. Beyond it
    no shard is created and no copy taken, and tables do not grow: Overloaded, with the numbers."""
    timeouts: PeerTimeouts = field(default_factory=PeerTimeouts)
    """After which silence servers take each other for dead."""
    num_threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Shards that are worked on at the same time."""

    def __post_init__(self) -> None:
        split_address(self.listen)
        if not 0 <= self.bulk_port < 65536:
            raise InvalidSpec(
                "bad port of the bulk transport", seen=str(self.bulk_port), expected="0 to 65535"
            )
        if self.server_id and not is_name(self.server_id):
            raise InvalidSpec("bad server id", seen=repr(self.server_id), expected=NAME_RULE)
        counts = (self.num_threads, self.max_unfinished_bytes, self.memory_limit_bytes)
        if min(counts) < 1 or self.lease_ttl_s <= 0:
            raise InvalidSpec(
                "a limit of the parameter server is out of range",
                seen=f"num_threads {self.num_threads}, lease_ttl_s {self.lease_ttl_s},"
                f" max_unfinished_bytes {self.max_unfinished_bytes},"
                f" memory_limit_bytes {self.memory_limit_bytes}",
                expected="all above zero",
            )
