"""Connections that a listening socket accepts, limited in total and for each peer."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from shoal_proto import descriptor_limit
from shoal_server.serving.admission import descriptors

log = structlog.get_logger(__name__)

ACCEPT_AGAIN_S = 0.5


async def accepted(
    listener: socket.socket, service: str
) -> AsyncIterator[tuple[socket.socket, Any]]:
    """Yield each connection to the listener, and its peer's address, for ever. An error is logged
    and followed by a pause. `service`: start of the name of that log event."""
    while True:
        try:
            connection = await asyncio.get_running_loop().sock_accept(listener)
        except OSError as error:
            log.warning(f"{service}_connection_not_accepted", reason=str(error))
            await asyncio.sleep(ACCEPT_AGAIN_S)
        else:
            yield connection


class ConnectionCounts:
    """Counts of open connections by peer, and of refused or closed ones by reason."""

    def __init__(self, port: str, *, most: int, most_per_peer: int) -> None:
        """`port`: name of the service in the log."""
        self._port = port
        self._most = most
        self._most_per_peer = most_per_peer
        self._by_peer: Counter[str] = Counter()
        self.num_open = 0
        self.refused: Counter[str] = Counter()

    def refusal(self, connected: socket.socket, peer: str) -> str:
        """Reason to refuse this connection; empty to accept it. A refusal is counted."""
        if descriptors.is_reserved(connected.fileno()):
            return self._refused("descriptors", descriptor_limit.limit() - descriptors.RESERVED)
        if self.num_open >= self._most:
            return self._refused("connections", self._most)
        if self._by_peer[peer] >= self._most_per_peer:
            return self._refused("connections of one peer", self._most_per_peer)
        return ""

    def _refused(self, kind: str, most: int) -> str:
        if not self.refused[kind]:
            log.warning("connections_refused", port=self._port, kind=kind, limit=most)
        self.refused[kind] += 1
        return f"too many {kind}; expected at most {most}"

    def count_closed(self, reason: str) -> None:
        """Count an open connection that is closed."""
        self.refused[reason] += 1

    @contextmanager
    def open(self, peer: str) -> Iterator[None]:
        """Count a connection as open during the block."""
        self.num_open += 1
        self._by_peer[peer] += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self._by_peer[peer] -= 1
            if not self._by_peer[peer]:
                del self._by_peer[peer]
