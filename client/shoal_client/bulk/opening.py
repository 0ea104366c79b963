"""Opening a connection of the bulk transport: asked for over gRPC, then by the nearest way."""

import mmap
import os
import socket

import structlog

from shoal_client.bulk.arena import Arena, arena_bytes
from shoal_client.bulk.connection import Connection
from shoal_proto import bulk
from shoal_proto.bulk import HEADER_BYTES, MAX_ARENA_BYTES, FrameReader, Kind
from shoal_proto.errors import MalformedMessage, ShoalError
from shoal_proto.v1.parameters_pb2 import OpenBulkReply

log = structlog.get_logger(__name__)

CONNECT_S = 1.0
HELLO_S = 3.0


def connect(offer: OpenBulkReply, address: str, largest_bytes: int) -> Connection | None:
    """A connection to the server at `address` that made the offer, for shards of at most so many
    bytes; None where there is no way to it but gRPC."""
    if not offer.port:
        return None
    connected = _connected(offer, address)
    if connected is None:
        return None
    try:
        arena = _greet(connected, offer.key, largest_bytes)
    except (OSError, ShoalError) as error:
        log.info("bulk_connection_failed", address=address, reason=str(error))
        connected.close()
        return None
    return Connection(connected, address, arena)


def _connected(offer: OpenBulkReply, address: str) -> socket.socket | None:
    if offer.local_name:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            local.connect(f"\0{offer.local_name}")
        except OSError:
            # Another machine, or another network namespace.
            local.close()
        else:
            return local
    host = address.rpartition(":")[0].strip("[]")
    try:
        remote = socket.create_connection((host, offer.port), CONNECT_S)
    except OSError as error:
        log.info("bulk_port_unreachable", address=address, port=offer.port, reason=str(error))
        return None
    remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return remote


def _greet(connected: socket.socket, key: bytes, largest_bytes: int) -> Arena | None:
    """The memory to share, if the server gives any. Raises OSError or MalformedMessage."""
    connected.settimeout(HELLO_S)
    is_local = connected.family == socket.AF_UNIX
    asked_bytes = arena_bytes(largest_bytes) if is_local else 0
    connected.sendall(bulk.message(Kind.HELLO, key, at=asked_bytes))
    descriptors: list[int] = []
    reader = FrameReader()
    try:
        while (frame := reader.next()) is None:
            if is_local and not descriptors:
                data, descriptors, _, _ = socket.recv_fds(connected, HEADER_BYTES, 1)
            else:
                data = connected.recv(HEADER_BYTES)
            if not data:
                raise MalformedMessage(
                    "the server did not take a bulk connection", seen="it hung up"
                )
            reader.space()[: len(data)] = data
            reader.received(len(data))
        if frame.kind is not Kind.HELLO or frame.at > MAX_ARENA_BYTES:
            raise MalformedMessage(
                "the server's answer to a bulk connection is not as it should be",
                seen=f"{frame.kind.name} with {frame.at} bytes",
                expected=f"HELLO with at most {MAX_ARENA_BYTES}",
            )
        if not descriptors or not frame.at:
            return None
        return Arena(mmap.mmap(descriptors[0], frame.at), largest_bytes)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


__all__ = ["connect"]
