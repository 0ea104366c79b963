"""Exclusion of forks while a thread of this process runs OpenSSL code.

OpenSSL's locks do not survive forks: if another thread of the parent holds one, the child hangs at
its own first use of OpenSSL. So a thread that makes a handshake, reads a certificate or makes a
context holds NO_FORK, and a fork waits for it. No thread holds NO_FORK while it waits for the
network.
"""

import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

NO_FORK = threading.RLock()
"""Held during such OpenSSL code, and during a fork."""

# The child's only thread is the one that forked, which holds the lock.
os.register_at_fork(
    before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=NO_FORK.release
)

Done = TypeVar("Done")


def secured_client(
    connected: socket.socket, context: ssl.SSLContext, name: str, within_s: float
) -> ssl.SSLSocket:
    """Return the connection within TLS, to a server that has `name` in its certificate. The result
    does not block: see `until_done`. Do not use the given socket any more. Raises OSError; the
    connection is then closed.
    """
    return _secured(
        connected,
        partial(context.wrap_socket, server_hostname=name, do_handshake_on_connect=False),
        within_s,
    )


def secured_server(
    connected: socket.socket, context: ssl.SSLContext, within_s: float
) -> ssl.SSLSocket:
    """Return the accepted connection within TLS, as `secured_client` does."""
    return _secured(
        connected,
        partial(context.wrap_socket, server_side=True, do_handshake_on_connect=False),
        within_s,
    )


def _secured(
    connected: socket.socket, wrap: Callable[[socket.socket], ssl.SSLSocket], within_s: float
) -> ssl.SSLSocket:
    try:
        connected.setblocking(False)
        with NO_FORK:
            secured = wrap(connected)
    except BaseException:
        connected.close()
        raise
    try:
        until_done(secured, secured.do_handshake, within_s)
    except BaseException:
        secured.close()
        raise
    return secured


def until_done(connection: ssl.SSLSocket, do: Callable[[], Done], within_s: float | None) -> Done:
    """Return the result of `do`, a non-blocking call on the connection, repeated whenever the
    network is ready. Raises TimeoutError after `within_s` seconds (None: no limit), and other
    errors of `do`.
    """
    give_up_s = None if within_s is None else time.monotonic() + within_s
    while True:
        try:
            with NO_FORK:
                return do()
        except ssl.SSLWantReadError:
            awaited = selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            awaited = selectors.EVENT_WRITE
        with selectors.DefaultSelector() as selector:
            selector.register(connection, awaited)
            left_s = None if give_up_s is None else give_up_s - time.monotonic()
            if (left_s is not None and left_s <= 0.0) or not selector.select(left_s):
                raise TimeoutError(f"a call on a TLS connection did not end within {within_s:g} s")
