"""Descriptors that come with what is received over a Unix socket. See unix(7), SCM_RIGHTS."""

import array
import socket

_ONE = socket.CMSG_SPACE(array.array("i").itemsize)


def receive_into(connected: socket.socket, space: memoryview) -> tuple[int, list[int]]:
    """Number of bytes received into `space`, 0 at the end, and the descriptors that came with them:
    one as a rule, to be closed by the caller and not inherited by other programs. Raises OSError.

    A plain `recv` would have the kernel close them.
    """
    count, ancillary, _, _ = connected.recvmsg_into([space], _ONE, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return count, list(found)
