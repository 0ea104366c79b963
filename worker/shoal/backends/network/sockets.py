"""Search for the sockets of this process that carry a group's connections.

A connection belongs to a group if one of its ends is a listener that a member announced.
Descriptors are inspected through duplicates, as the kernel may reuse the number of a closed one.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_ESTABLISHED = 1
"""TCP_INFO's first byte (`tcp(7)`) for a connection that neither side has closed."""


def socket_address_bytes(family: int, address: tuple[str, int]) -> bytes:
    """Encode an end of a connection as the kernel's `sockaddr`: family, port, address."""
    head = struct.pack("=H", family) + struct.pack(">H", address[1])
    if family == socket.AF_INET:
        return head + socket.inet_pton(family, address[0])
    return head + bytes(4) + socket.inet_pton(family, address[0].partition("%")[0])


def shut_connections(announced: Callable[[bytes], bool]) -> int:
    """Shut down every connection with an `announced` end; return their number. Listeners stay
    open."""
    count = 0
    for connection in _internet_sockets():
        with connection:
            if not _listens(connection) and any(map(announced, _ends(connection))):
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
                count += 1
    return count


def count_connected(announced: Callable[[bytes], bool]) -> int:
    """Count the connections with an `announced` end that neither side has closed."""
    count = 0
    for connection in _internet_sockets():
        with connection:
            if _state(connection) == _ESTABLISHED and any(map(announced, _ends(connection))):
                count += 1
    return count


def listening(announced: Callable[[bytes], bool]) -> list[tuple[str, int]]:
    """Return the `announced` addresses on which this process listens."""
    found = []
    for listener in _internet_sockets():
        with listener:
            if _listens(listener):
                address = listener.getsockname()[:2]
                if announced(socket_address_bytes(listener.family, address)):
                    found.append(address)
    return found


def _internet_sockets() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            # Sockets only: closing a duplicate of a file would drop its owner's locks.
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
            duplicate = os.dup(int(entry.name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        if found.family in _INTERNET and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


def _listens(candidate: socket.socket) -> bool:
    return bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _state(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def _ends(connection: socket.socket) -> list[bytes]:
    ends = [connection.getsockname()[:2]]
    with contextlib.suppress(OSError):  # not connected yet
        ends.append(connection.getpeername()[:2])
    return [socket_address_bytes(connection.family, end) for end in ends]
