"""TLS over a connected socket. Blocks."""

import socket

from shoal_proto.forks.openssl import secured_client, secured_server
from shoal_proto.tls import identity
from shoal_proto.tls.names import SERVER_NAME

HANDSHAKE_S = 3.0


def secured(connected: socket.socket, name: str = SERVER_NAME) -> socket.socket:
    """Return the connection, within TLS if this process has a certificate and the socket is not a
    Unix socket. Use only the result afterwards.

    Raises OSError, and then closes the connection.
    """
    own = identity.own()
    if own is None or connected.family == socket.AF_UNIX:
        return connected
    try:
        client = own.material.client
    except BaseException:
        connected.close()
        raise
    secured = secured_client(connected, client, name, HANDSHAKE_S)
    secured.settimeout(HANDSHAKE_S)
    return secured


def secure_accepted(connected: socket.socket) -> socket.socket:
    """Return an accepted connection, within TLS as for `secured`: the other end needs a
    certificate, too."""
    own = identity.own()
    if own is None or connected.family == socket.AF_UNIX:
        return connected
    try:
        server = own.material.server
    except BaseException:
        connected.close()
        raise
    secured = secured_server(connected, server, HANDSHAKE_S)
    secured.settimeout(HANDSHAKE_S)
    return secured
