"""What a coordinator is started with."""

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.coordinator.retention_policy import RetentionPolicy
from shoal_server.coordinator.snapshots.policy import SnapshotPolicy
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
    retention: Annotated[RetentionPolicy, FLAT] = field(default_factory=RetentionPolicy)
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
