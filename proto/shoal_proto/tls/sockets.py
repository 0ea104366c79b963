"""TLS over a socket that is connected to a parameter server. Blocks."""

import socket

from shoal_proto.forks.openssl import secured_client
from shoal_proto.tls import identity
from shoal_proto.tls.names import SERVER_NAME

HANDSHAKE_S = 3.0


def secured(connected: socket.socket) -> socket.socket:
    """The connection to a parameter server, within TLS if it leads to another machine and this
    process has a certificate; the one that was given is not to be used any more then.

    Raises OSError, and has closed the connection then.
    """
    own = identity.own()
    if own is None or connected.family == socket.AF_UNIX:
        return connected
    try:
        context = own.material.client
    except BaseException:
        connected.close()
        raise
    secured = secured_client(connected, context, SERVER_NAME, HANDSHAKE_S)
    secured.settimeout(HANDSHAKE_S)
    return secured
