"""How much callers may ask of a process at once: settings with defaults."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.serving.admission import descriptors

_COUNT = Parameter(metavar="N")
_SECONDS = Parameter(metavar="SECONDS")


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Of the gRPC port."""

    max_connections: Annotated[int, _COUNT] = 16_384
    """Connections to the gRPC port at once, and never more than three quarters of the descriptors
    that this process may have. One more is closed as soon as it is opened."""
    max_streams: Annotated[int, _COUNT] = 20_000
    """Calls under way on one connection; a client keeps further ones back until others end."""
    max_calls: Annotated[int, _COUNT] = 60_000
    """Calls under way altogether, those that wait included; one more is refused as Overloaded."""
    max_calls_per_peer: Annotated[int, _COUNT] = 30_000
    """The same of one IP address: members on one machine have one together."""
    handshake_s: Annotated[float, _SECONDS] = 10.0
    """A connection that has not begun to speak HTTP/2 (and TLS) by then is closed."""
    idle_connection_s: Annotated[float, _SECONDS] = 3600.0
    """A connection without a call for so long is closed; its client opens another when it calls."""

    def __post_init__(self) -> None:
        _check_above_zero(self)

    @property
    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """For gRPC. Of peers it knows nothing: it counts connections together."""
        connections = min(self.max_connections, descriptors.for_strangers(0.75))
        return (
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            ("grpc.max_connection_idle_ms", _ms(self.idle_connection_s)),
        )


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Of the HTTP port."""

    http_connections: Annotated[int, _COUNT] = 2048
    """HTTP connections at once, and never more than a quarter of the descriptors that this process
    may have. One more is answered 503 and closed."""
    http_connections_per_peer: Annotated[int, _COUNT] = 1024
    """The same of one IP address: workers on one machine report their health from one."""
    http_request_s: Annotated[float, _SECONDS] = 10.0
    """A request whose head, and then whose body, has not come by then is answered 408 and its
    connection closed; one that says nothing too."""
    http_stalled_s: Annotated[float, _SECONDS] = 10.0
    """Who does not read its answer for so long is hung up on."""
    live_pages: Annotated[int, _COUNT] = 256
    """Live pages (streams of server-sent events) at once; one more is answered 503."""
    live_pages_per_peer: Annotated[int, _COUNT] = 64
    """The same of one IP address."""

    def __post_init__(self) -> None:
        _check_above_zero(self)

    @property
    def most_connections(self) -> int:
        """As many as descriptors allow."""
        return min(self.http_connections, descriptors.for_strangers(0.25))


@dataclass(frozen=True, kw_only=True)
class JobLimits:
    """Of what callers have a coordinator keep, and of their waits."""

    max_jobs: Annotated[int, _COUNT] = 10_000
    """Jobs that this cluster knows, those included that are over and not removed yet. The first
    worker of one more is refused as Overloaded."""
    rendezvous_bytes: Annotated[int, Parameter(metavar="BYTES")] = 64 * 1024 * 1024
    """What the rendezvous store of one generation of a job holds, its keys included. Who sets more
    is refused as Overloaded."""
    rendezvous_keys: Annotated[int, _COUNT] = 200_000
    """How many keys it holds. torch.distributed sets a few for each pair that connects."""
    rendezvous_wait_s: Annotated[float, _SECONDS] = 600.0
    """The longest wait for a key of it, whatever a caller asks for."""
    call_wait_s: Annotated[float, _SECONDS] = 60.0
    """The longest wait of other calls (for a generation's record, a shard map), whatever a caller
    asks for."""

    def __post_init__(self) -> None:
        _check_above_zero(self)


def _ms(seconds: float) -> int:
    return int(min(seconds * 1000, 2**31 - 1))


def _check_above_zero(limits: CallLimits | HttpLimits | JobLimits) -> None:
    for name, value in vars(limits).items():
        if not value > 0:
            option = f"--{name.replace('_', '-')}"
            raise InvalidSpec(f"bad {option}", seen=f"{value:g}", expected="above 0")
