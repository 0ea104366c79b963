"""Opening a connection of the bulk transport to a server that has offered one over gRPC."""

import structlog

from shoal_client.bulk.arena import Arena, arena_bytes
from shoal_client.bulk.connection import BulkConnection
from shoal_proto.bulk_opening import connect_to_offer, present_key
from shoal_proto.errors import ShoalError
from shoal_proto.tls.sockets import secured
from shoal_proto.v1.parameters_pb2 import OpenBulkReply

log = structlog.get_logger(__name__)


def connect(
    offer: OpenBulkReply, address: str, largest_bytes: int, num_parts: int
) -> BulkConnection | None:
    """Connect to the server at `address` that made the offer, for calls with about `num_parts`
    parts of at most `largest_bytes` each. None if only gRPC reaches the server."""
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
