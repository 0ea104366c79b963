"""Limits on the load from callers: settings with defaults."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_server.serving.admission import descriptors

_COUNT = Parameter(metavar="N")
_SECONDS = Parameter(metavar="SECONDS")


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """Limits of the gRPC port."""

    max_connections: Annotated[int, _COUNT] = 16_384
    """Most connections to the gRPC port at once; never more than three quarters of the descriptors
    that this process may have. A further one is closed as soon as it is opened."""
    max_streams: Annotated[int, _COUNT] = 20_000
    """Most calls in progress on one connection; the client holds further calls back until others
    end."""
    max_calls: Annotated[int, _COUNT] = 60_000
    """Most calls in progress over all connections, including calls that wait for something; a
    further one is refused as Overloaded."""
    max_calls_per_peer: Annotated[int, _COUNT] = 30_000
    """The same limit for one IP address, which all members on a machine share."""
    handshake_s: Annotated[float, _SECONDS] = 10.0
    """A connection that has not started HTTP/2, and TLS if it is used, after this time is
    closed."""
    idle_connection_s: Annotated[float, _SECONDS] = 3600.0
    """A connection without a call for this long is closed; its client opens another one when it
    calls."""

    def __post_init__(self) -> None:
        _check_above_zero(self)

    @property
    def channel_options(self) -> tuple[tuple[str, int], ...]:
        """Options for gRPC's server, which counts connections of all peers together."""
        connections = min(self.max_connections, descriptors.descriptors_for_callers(0.75))
        return (
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", _ms(self.handshake_s)),
            ("grpc.max_connection_idle_ms", _ms(self.idle_connection_s)),
        )


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits of the HTTP port."""

    http_connections: Annotated[int, _COUNT] = 2048
    """Most HTTP connections at once; never more than a quarter of the descriptors that this process
    may have. A further one is answered with 503, unless TLS is used, and closed."""
    http_connections_per_peer: Annotated[int, _COUNT] = 1024
    """The same limit for one IP address, which all workers on a machine share for their health
    reports."""
    http_request_s: Annotated[float, _SECONDS] = 10.0
    """Time for the head of a request to arrive, from the connection's start or the request's first
    byte, and then for its body. After that, the answer is 408 and the connection is closed."""
    http_stalled_s: Annotated[float, _SECONDS] = 10.0
    """A connection whose client does not read the answer for this long is closed."""
    live_pages: Annotated[int, _COUNT] = 256
    """Most live pages (streams of server-sent events) at once; a further one is answered with 503.
    """
    live_pages_per_peer: Annotated[int, _COUNT] = 64
    """The same limit for one IP address."""

    def __post_init__(self) -> None:
        _check_above_zero(self)

    @property
    def most_connections(self) -> int:
        """Maximum number of HTTP connections: `http_connections`, or fewer if the descriptors allow
        no more."""
        return min(self.http_connections, descriptors.descriptors_for_callers(0.25))


@dataclass(frozen=True, kw_only=True)
class JobLimits:
    """Limits of the state that callers create in a coordinator, and of their waits."""

    max_jobs: Annotated[int, _COUNT] = 10_000
    """Most jobs in this cluster, including those that have ended and are not removed yet. The first
    worker of a further job is refused as Overloaded."""
    rendezvous_bytes: Annotated[int, Parameter(metavar="BYTES")] = 64 * 1024 * 1024
    """Most bytes in the rendezvous store of one generation of a job, keys included. Calls that
    would set more are refused as Overloaded."""
    rendezvous_keys: Annotated[int, _COUNT] = 200_000
    """Most keys in the rendezvous store. torch.distributed sets a few for each pair of ranks that
    connects."""
    rendezvous_wait_s: Annotated[float, _SECONDS] = 600.0
    """The longest wait for a key in the rendezvous store, whatever a caller asks for."""
    call_wait_s: Annotated[float, _SECONDS] = 60.0
    """The longest wait of other calls (for a shard map, the parts of a publication), whatever a
    caller asks for."""

    def __post_init__(self) -> None:
        _check_above_zero(self)


def _ms(seconds: float) -> int:
    return int(min(seconds * 1000, 2**31 - 1))


def _check_above_zero(limits: CallLimits | HttpLimits | JobLimits) -> None:
    for name, value in vars(limits).items():
        if not value > 0:
            option = f"--{name.replace('_', '-')}"
            raise InvalidSpec(f"bad {option}", seen=f"{value:g}", expected="above 0")
