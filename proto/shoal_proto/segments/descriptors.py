"""Descriptors received over a Unix socket. See unix(7), SCM_RIGHTS."""

import array
import socket

_ONE = socket.CMSG_SPACE(array.array("i").itemsize)


def receive_into(connected: socket.socket, space: memoryview) -> tuple[int, list[int]]:
    """Receive bytes into `space`; return their number, 0 at the end, and their descriptors, usually
    one.

    The caller must close the descriptors. Raises OSError.
    """
    count, ancillary, _, _ = connected.recvmsg_into([space], _ONE, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return count, list(found)
