"""The transport that a process was told to use, by SHOAL_TRANSPORT or an argument."""

import os

from shoal_proto.errors import InvalidSpec

TRANSPORTS = ("auto", "tcp", "grpc")
TRANSPORT_VARIABLE = "SHOAL_TRANSPORT"


def transport_of(asked: str | None) -> str:
    """The transport asked for; None: the one that the environment names.

    `auto`: memory shared with processes of this machine, TCP sockets to any other; `tcp`: sockets
    to all of them; `grpc`: gRPC, to which the others fall back. Raises InvalidSpec for another one.
    """
    transport = os.environ.get(TRANSPORT_VARIABLE, "auto") if asked is None else asked
    if transport not in TRANSPORTS:
        raise InvalidSpec(
            "unknown transport",
            seen=repr(transport),
            expected=", ".join(TRANSPORTS),
            fix=f"Set {TRANSPORT_VARIABLE} or `transport` to one of them.",
        )
    return transport
