"""The transport that a process uses."""

import os

from shoal_proto.errors import InvalidSpec

TRANSPORTS = ("auto", "tcp", "grpc")
TRANSPORT_VARIABLE = "SHOAL_TRANSPORT"


def transport_of(asked: str | None) -> str:
    """The requested transport; None: SHOAL_TRANSPORT, or `auto`. `auto`: shared memory with servers
    on this machine, TCP sockets to others. `tcp`: sockets to all servers. `grpc`: gRPC, to which
    `auto` and `tcp` fall back. Raises InvalidSpec for any other name."""
    transport = os.environ.get(TRANSPORT_VARIABLE, "auto") if asked is None else asked
    if transport not in TRANSPORTS:
        raise InvalidSpec(
            "unknown transport",
            seen=repr(transport),
            expected=", ".join(TRANSPORTS),
            fix=f"Set {TRANSPORT_VARIABLE} or `transport` to one of them.",
        )
    return transport
