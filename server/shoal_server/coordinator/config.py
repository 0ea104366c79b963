"""Options with which a coordinator is started."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.addresses import split_address
from shoal_proto.errors import InvalidSpec
from shoal_server.coordinator.plug_in.options import ParameterOptions, SnapshotPolicy
from shoal_server.coordinator.retention_policy import RetentionPolicy
from shoal_server.core.limits import Limits
from shoal_server.etcd.election import DEFAULT_TTL_S
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.serving.admission.config import CallLimits, HttpLimits, JobLimits
from shoal_server.serving.listening import is_loopback, listen_address
from shoal_server.serving.options import (
    FLAT,
    AdvertisedAddress,
    CoordinatorServing,
    HttpClients,
    ListenAddress,
    ReadyFile,
)


@dataclass(frozen=True, kw_only=True)
class CallerLimits:
    """Limits on what callers may use of the coordinator."""

    calls: Annotated[CallLimits, FLAT] = field(default_factory=CallLimits)
    http: Annotated[HttpLimits, FLAT] = field(default_factory=HttpLimits)
    jobs: Annotated[JobLimits, FLAT] = field(default_factory=JobLimits)


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Keeps the membership of jobs in etcd and serves gRPC and HTTP until SIGTERM. Run several on
    one etcd: one leads, and another takes over if it dies."""

    reach: Annotated[CoordinatorServing, FLAT] = field(default_factory=CoordinatorServing)
    listen: ListenAddress = "7700"
    http: Annotated[str, Parameter(metavar="[HOST:]PORT")] = "7780"
    """Address of the status page and its API. PORT alone: at the address of --bind."""
    http_hosts: Annotated[Sequence[str], Parameter(name="--http-host", metavar="NAME")] = ()
    """Further host name by which browsers and tools may reach the page, such as the name of a load
    balancer or an ingress. Addresses, names without a dot, names of this machine and of its cluster
    (.svc, .internal) and the advertised host are always allowed. Can be repeated. "*" allows any
    name; then any web site can read the API through a browser that reaches it."""
    http_tokens: Annotated[Path | None, Parameter(metavar="FILE")] = None
    """Let only holders of a token read the page and its API, and only operators act: `shoal token`
    makes tokens and this file. Without it, every caller that --http-clients admits may do both; but
    if certificates identify the callers, none may act."""
    http_clients: Annotated[HttpClients, Parameter(show_default=True)] = "certificate"
    """Proof required of callers of the page. certificate: over TLS, a certificate from the
    cluster's authority. token: over TLS, a token; for browsers. user: on loopback without TLS, a
    process of this user or root; others need a token. If --listen is not on loopback, members on
    other machines report their health at a port of its own, with their certificates."""
    advertise: AdvertisedAddress = ""
    ready_file: ReadyFile = None
    limits: Annotated[Limits, FLAT] = field(default_factory=Limits)
    leader_lease_s: Annotated[float, Parameter(metavar="SECONDS")] = DEFAULT_TTL_S
    """A leader that hangs or is cut off is replaced after this time (etcd may take longer). A
    killed leader is replaced at once, if the other coordinators reach its host. A leader that was
    suspended (SIGSTOP) for most of this time steps down. Below 2 s, terms end needlessly: an
    election within etcd takes 1 to 2 s."""
    drain_s: Annotated[float, Parameter(metavar="SECONDS")] = 25.0
    """Longest time that the leader, on SIGTERM, waits for members that drain: they write a last
    checkpoint meanwhile. If no member drains, the leader ends after 5 s, or at once if its jobs
    have no members, but not before etcd has its last changes. A second signal ends the leader at
    once. 0: it does not wait."""
    without_parameters: Annotated[bool, Parameter(name="--no-parameters")] = False
    """Serve no jobs with parameters on servers (async-sgd, ssp, bsp, tables): load nothing of what
    they need, and refuse their calls. Set this for all coordinators of one etcd, or for none."""
    copies: Annotated[int, Parameter(metavar="N")] = 2
    """Number of servers that hold each shard of parameters, if there are that many."""
    snapshots: Annotated[SnapshotPolicy, FLAT] = field(default_factory=SnapshotPolicy)
    retention: Annotated[RetentionPolicy, FLAT] = field(default_factory=RetentionPolicy)
    etcd: Annotated[EtcdConfig, FLAT] = field(default_factory=EtcdConfig)
    admission: Annotated[CallerLimits, FLAT] = field(default_factory=CallerLimits)

    def __post_init__(self) -> None:
        object.__setattr__(self, "listen", listen_address(self.listen, self.reach.bind))
        object.__setattr__(self, "http", listen_address(self.http, self.reach.bind, "--http"))
        self.reach.check({"gRPC": self.listen, "HTTP": self.http})
        if self.http_clients == "token" and self.http_tokens is None:
            raise InvalidSpec(
                "anybody could read the page",
                seen="--http-clients token without --http-tokens",
                expected="a file of tokens as well",
                fix="Make one: shoal token create --role viewer --name NAME --file FILE",
            )
        if self.http_clients == "user" and not is_loopback(split_address(self.http)[0]):
            raise InvalidSpec(
                "the user of a caller on another machine is not known",
                seen=f"--http-clients user with --http {self.http}",
                expected="an address on loopback for the page",
            )
        if self.copies < 1:
            raise InvalidSpec("bad --copies", seen=str(self.copies), expected="1 or more")
        if not self.drain_s >= 0:
            raise InvalidSpec("bad --drain-s", seen=f"{self.drain_s:g}", expected="0 or more")
        if not self.leader_lease_s > 0:
            raise InvalidSpec(
                "bad --leader-lease-s", seen=f"{self.leader_lease_s:g}", expected="above 0"
            )

    @property
    def parameter_options(self) -> ParameterOptions | None:
        """Options of jobs with parameters on servers; None if they are not served."""
        if self.without_parameters:
            return None
        return ParameterOptions(copies=self.copies, snapshots=self.snapshots)
