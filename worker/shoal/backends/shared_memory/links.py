"""Connections between ranks that share memory: they notify a rank when another is lost.

Shared memory does not show that a peer has died. So each rank has a connection to rank 0, and a
thread waits for the connection's end. A rank that leaves in order sends `LEAVING` first. A
connection that ends without that message, also by `cut`, means a loss; rank 0 then ends all its
connections, which notifies the others.
"""

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence

LEAVING = b"L"


class PeerSockets:
    """Connections of one rank: rank 0 has a connection to each other rank, any other rank has one
    to rank 0."""

    def __init__(
        self, connections: Sequence[socket.socket], on_lost: Callable[[str], None]
    ) -> None:
        """Start a thread that waits for the loss of a rank, and then calls `on_lost` with the
        reason, at most once. `on_lost` is a bound method, and is referred to weakly, so that the
        connections are closed even if its object does not call `close`."""
        self._connections = tuple(connections)
        # Held while this rank notifies its peers that it leaves: a notified peer ends its
        # connection at once, and `_watch` would then close the connections to the other peers.
        # Reentrant: garbage collection may run the finalizer in the thread that holds the lock.
        leaving = threading.RLock()
        self._finalizer = weakref.finalize(self, _leave, self._connections, leaving, os.getpid())
        for connection in self._connections:
            connection.settimeout(None)
        threading.Thread(
            target=_watch,
            args=(self._connections, weakref.WeakMethod(on_lost), leaving),
            name="shoal-links",
            daemon=True,
        ).start()

    def close(self) -> None:
        """Leave in order, after this rank's last barrier."""
        self._finalizer()

    def cut(self) -> None:
        """End the connections without a message: then no rank waits for this one. Thread-safe."""
        self._finalizer.detach()
        _shut(self._connections)


def _watch(
    connections: Sequence[socket.socket],
    on_lost: "weakref.WeakMethod[Callable[[str], None]]",
    leaving: threading.RLock,
) -> None:
    """Watch until no connection is left; then close the sockets, to which `PeerSockets` may still
    refer."""
    _await_lost(connections, on_lost)
    with leaving:
        for connection in connections:
            connection.close()


def _await_lost(
    connections: Sequence[socket.socket], on_lost: "weakref.WeakMethod[Callable[[str], None]]"
) -> None:
    by_descriptor = {each.fileno(): each for each in connections}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    while by_descriptor:
        for descriptor, _ in poll.poll():
            try:
                message = by_descriptor[descriptor].recv(1)
            except OSError:
                message = b""
            poll.unregister(descriptor)
            del by_descriptor[descriptor]
            if message != LEAVING:
                callback = on_lost()
                if callback is not None:
                    callback("a rank on this machine is gone")
                return


def _leave(connections: Sequence[socket.socket], leaving: threading.RLock, owner: int) -> None:
    if os.getpid() != owner:
        return  # A process that the script has forked has the connections too, but is no rank.
    with leaving:
        for connection in connections:
            try:
                connection.send(LEAVING)
            except OSError:
                continue  # The peer has closed it already.
        _shut(connections)


def _shut(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # Shut already.
