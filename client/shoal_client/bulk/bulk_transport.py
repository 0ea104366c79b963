"""Choice of the transport to one server: a bulk connection or gRPC."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from shoal_client.bulk.arena import Arena, arena_bytes
from shoal_client.bulk.connection import BulkConnection
from shoal_proto.bulk_opening import connect_to_offer, present_key
from shoal_proto.errors import ShoalError
from shoal_proto.tls.sockets import secured
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.parameters_pb2 import OpenBulkReply, OpenBulkRequest

log = structlog.get_logger(__name__)

AGAIN_S = 30.0
"""Wait after a failed attempt to open a bulk connection."""


class OpenBulkCall(Protocol):
    """Method Parameters.OpenBulk of the server."""

    def __call__(self, request: OpenBulkRequest, /, *, timeout: float) -> OpenBulkReply: ...


class BulkTransport:
    """Transport to one server, for one thread at a time; any thread may call `close`."""

    def __init__(
        self,
        address: str,
        open_bulk: OpenBulkCall,
        token: Callable[[], Token],
        *,
        transport: str,
        slot_bytes_for: Callable[[int], int],
    ) -> None:
        """`transport`: "auto", "tcp" (no shared memory) or "grpc". `slot_bytes_for`: size of a
        slot, given the largest part's size."""
        self._address = address
        self._open_bulk = open_bulk
        self._token = token
        self._slot_bytes_for = slot_bytes_for
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection: BulkConnection | None = None
        self._largest_bytes = 0
        self._may_be_local = transport == "auto"
        self._not_until_s = float("inf") if transport == "grpc" else 0.0

    def connection(
        self, largest_bytes: int, num_parts: int, timeout_s: float
    ) -> BulkConnection | None:
        """Return a connection for about `num_parts` parts of at most `largest_bytes` each; None:
        use gRPC. Raises grpc.RpcError."""
        held = self._connection
        if held is not None and held.is_usable and largest_bytes <= self._largest_bytes:
            return held
        if time.monotonic() < self._not_until_s:
            return None
        if held is not None:
            held.close()
            self._connection = None
        offer = self._open_bulk(OpenBulkRequest(token=self._token()), timeout=timeout_s)
        if not self._may_be_local:
            offer.local_name = ""
        self._largest_bytes = self._slot_bytes_for(largest_bytes)
        connection = connect(offer, self._address, self._largest_bytes, num_parts)
        if connection is None:
            self._not_until_s = time.monotonic() + AGAIN_S
        with self._lock:
            self._connection = connection
            is_late = self._is_closed
        if connection is not None and is_late:
            # `close` ran meanwhile: the call must fail, like a call in progress.
            connection.close()
        return connection

    @property
    def name(self) -> str:
        """Transport of the last call: `shared-memory`, `unix-socket`, `tcp`, `tls` or `grpc`.
        Before the first call: `grpc`."""
        return self._connection.transport if self._connection is not None else "grpc"

    def close(self) -> None:
        """Close the connection; a call in progress fails, even while it connects."""
        with self._lock:
            self._is_closed = True
            held = self._connection
        if held is not None:
            held.close()


def connect(
    offer: OpenBulkReply, address: str, largest_bytes: int, num_parts: int
) -> BulkConnection | None:
    """Connect to the server that made the offer; None if only gRPC reaches the server."""
    if not offer.port:
        return None
    try:
        connected = secured(connect_to_offer(offer, address))
    except OSError as error:
        log.info("bulk_port_unreachable", address=address, port=offer.port, reason=str(error))
        return None
    try:
        requested_bytes = arena_bytes(largest_bytes, num_parts)
        shared = present_key(connected, offer.key, requested_bytes)
    except (OSError, ShoalError) as error:
        log.info("bulk_connection_failed", address=address, reason=str(error))
        connected.close()
        return None
    arena = Arena(shared, largest_bytes) if shared is not None else None
    return BulkConnection(connected, address, arena)
