"""Opening of a bulk connection: over a Unix socket on the same machine, else over TCP."""

import mmap
import os
import socket

from shoal_proto import bulk
from shoal_proto.addresses import split_address
from shoal_proto.bulk import HEADER_BYTES, MAX_ARENA_BYTES, FrameKind, FrameReader
from shoal_proto.errors import MalformedMessage
from shoal_proto.v1.parameters_pb2 import OpenBulkReply

CONNECT_S = 1.0
HELLO_S = 3.0


def connect_to_offer(offer: OpenBulkReply, address: str) -> socket.socket:
    """Connect to the server that made the offer: to its Unix socket, or else to its TCP port. The
    connection has the time limit CONNECT_S. Raises OSError."""
    if offer.local_name:
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.settimeout(CONNECT_S)
        try:
            local.connect(f"\0{offer.local_name}")
        except OSError:
            # Another machine, or another network namespace.
            local.close()
        else:
            return local
    remote = socket.create_connection((split_address(address)[0], offer.port), CONNECT_S)
    remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return remote


def present_key(connected: socket.socket, key: bytes, arena_bytes: int) -> mmap.mmap | None:
    """Present the key, and over a Unix socket ask for `arena_bytes` of shared memory. Returns that
    memory, whose size the server chooses, or None. The connection then has the time limit HELLO_S.
    Raises OSError, MalformedMessage or ChecksumMismatch.
    """
    connected.settimeout(HELLO_S)
    is_local = connected.family == socket.AF_UNIX
    at = arena_bytes if is_local else 0
    connected.sendall(bulk.message(FrameKind.HELLO, key, at=at))
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
                    "the server refused a bulk connection", seen="it closed the connection"
                )
            reader.space()[: len(data)] = data
            reader.received(len(data))
        if frame.kind is not FrameKind.HELLO or frame.at > MAX_ARENA_BYTES:
            raise MalformedMessage(
                "the server answered a bulk connection with an unexpected frame",
                seen=f"{frame.kind.name} with {frame.at} bytes",
                expected=f"HELLO with at most {MAX_ARENA_BYTES}",
            )
        if not descriptors or not frame.at:
            return None
        return _mapped(descriptors[0], frame.at)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, num_bytes)
    except ValueError as error:
        raise MalformedMessage(
            "the server sent shared memory that is smaller than it says",
            seen=str(error),
            expected=f"{num_bytes} bytes",
        ) from error
