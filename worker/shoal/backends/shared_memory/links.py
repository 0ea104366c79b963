"""Connections between ranks that share memory: they notify a rank when another rank is lost.

Each rank has a connection to rank 0, and sends `LEAVING` when it leaves in order. A connection's
end without that message means a loss. Rank 0 then ends all its connections.
"""

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence

LEAVING = b"L"


class PeerSockets:
    """Connections of one rank: of rank 0 to each other rank, of any other rank to rank 0."""

    def __init__(
        self, connections: Sequence[socket.socket], on_lost: Callable[[str], None]
    ) -> None:
        """Start a thread that calls `on_lost` with the reason, at most once, when a rank is lost.
        The bound method `on_lost` is referred to weakly, so that the connections are closed even
        without `close`."""
        self._connections = tuple(connections)
        # Held while this rank sends LEAVING: once a notified peer ends its connection, `_watch`
        # would close the others. Reentrant, as garbage collection may run the finalizer here.
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
        """End the connections without a message: the peers then see a loss. Thread-safe."""
        self._finalizer.detach()
        _shut(self._connections)


def _watch(
    connections: Sequence[socket.socket],
    on_lost: "weakref.WeakMethod[Callable[[str], None]]",
    leaving: threading.RLock,
) -> None:
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
        return  # A process forked by the script has the connections too, but is not a rank.
    with leaving:
        for connection in connections:
            try:
                connection.send(LEAVING)
            except OSError:
                continue
        _shut(connections)


def _shut(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
