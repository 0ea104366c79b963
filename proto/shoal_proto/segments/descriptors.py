"""Descriptors of memory files: their limit, and descriptors received over a Unix socket. See
unix(7), SCM_RIGHTS."""

import array
import errno
import os
import socket
from typing import TypeGuard

from shoal_proto.descriptor_limit import limit
from shoal_proto.errors import Overloaded, ShoalError

_ONE = socket.CMSG_SPACE(array.array("i").itemsize)
_LACKED_BY = "descriptors_lacked_by"


def receive_into(connected: socket.socket, space: memoryview) -> tuple[int, list[int]]:
    """Receive bytes into `space`; return their number (0 at the end of the stream), and the
    descriptors that came with them.

    The caller must close the descriptors. Raises OSError, and Overloaded if the kernel has dropped
    the descriptor because this process can open no further file.
    """
    count, ancillary, flags, _ = connected.recvmsg_into([space], _ONE, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    if flags & socket.MSG_CTRUNC and not found:
        raise no_descriptor()
    return count, list(found)


def duplicate(descriptor: int) -> int:
    """Return another descriptor of the same file. Raises Overloaded as `no_descriptor` says."""
    try:
        return os.dup(descriptor)
    except OSError as error:
        if error.errno == errno.EBADF:
            raise
        # EMFILE, or EINVAL if the limit is 0.
        raise no_descriptor(error.errno) from error


def is_out_of_descriptors(error: Exception) -> TypeGuard[OSError]:
    """True for the system's error that this process, or the host, can open no further file."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def no_descriptor(number: int | None = errno.EMFILE) -> Overloaded:
    """Return the error for: this process, or its host (errno ENFILE), can open no further file. The
    text names the process, because the publisher shows the errors of servers, too."""
    seen = f"{os.strerror(errno.EMFILE)}: the limit is {limit()}"
    fix = "Raise the limit, with `ulimit -n` or LimitNOFILE of systemd."
    if number == errno.ENFILE:
        seen = f"{os.strerror(errno.ENFILE)}: the limit is of the whole host"
        fix = "Raise fs.file-max on that host (see sysctl(8))."
    return Overloaded(
        f"{_this_process()} cannot open a file for a segment of published weights",
        seen=seen,
        expected="a descriptor for each segment of a version, and of the version before it",
        fix=fix,
        details={_LACKED_BY: _this_process()},
    )


def lacks_descriptor(error: ShoalError) -> bool:
    """True if the error is from `no_descriptor` in this process, not in the peer."""
    return error.details.get(_LACKED_BY) == _this_process()


def _this_process() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()}"
