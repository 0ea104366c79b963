"""User of the process at the other end of a local TCP connection, as the kernel reports it: from
`sock_diag(7)`, or else from `/proc/net/tcp`. So a server on loopback tells users apart without a
secret. A request to sock_diag is a `nlmsghdr` and an `inet_diag_req_v2`; an answer is a `nlmsghdr`
and an `inet_diag_msg`, whose last five numbers are `_FIGURES`: expires, rqueue, wqueue, uid and
inode."""

import errno
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

PEER_USER = "peer_user"
"""Key of a request's state for the result of `user_of_peer`."""
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_ESTABLISHED = 1
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = 0xFFFFFFFF
_HEAD = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_SOCKET_ID_BYTES = 48
_FIGURES = struct.Struct("=IIIII")
_TABLES: Mapping[int, str] = {socket.AF_INET: "/proc/net/tcp", socket.AF_INET6: "/proc/net/tcp6"}
OVERFLOW_UID_FILE = Path("/proc/sys/kernel/overflowuid")
"""File with the id that stands for users without an id in this namespace."""

Address = tuple[str, int]


def user_of_peer(connected: socket.socket) -> int | None:
    """User id of the process at the other end of this connection. None if that process is on
    another machine or has closed its end, or if the kernel does not know the user."""
    if connected.family not in _TABLES:
        return None
    try:
        theirs, ours = connected.getpeername()[:2], connected.getsockname()[:2]
    except OSError as error:
        # The other process has reset the connection.
        log.debug("socket_not_connected", reason=str(error))
        return None
    try:
        found = ask_sock_diag(connected.family, theirs, ours)
    except OSError as error:
        log.debug("socket_not_looked_up", reason=str(error))
        found = _listed(connected.family, theirs, ours)
    return None if found == _unmapped() else found


def ask_sock_diag(family: int, theirs: Address, ours: Address) -> int | None:
    """User id from sock_diag; None if the socket is unknown or closed. Raises OSError for other
    failures."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    request += _PORTS.pack(theirs[1], ours[1])
    request += b"".join(_packed(family, each[0]) for each in (theirs, ours))
    request += struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    head = _HEAD.pack(_HEAD.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.setblocking(False)  # the kernel answers within the call that sends
        kernel.send(head + request)
        answer = kernel.recv(4096)
    kind = _HEAD.unpack_from(answer)[1]
    if kind == _NLMSG_ERROR:
        (number,) = struct.unpack_from("=i", answer, _HEAD.size)
        if -number == errno.ENOENT:
            return None
        raise OSError(-number, os.strerror(-number))
    state = answer[_HEAD.size + 1]
    *_, uid, inode = _FIGURES.unpack_from(answer, _HEAD.size + 4 + _SOCKET_ID_BYTES)
    # A socket without an inode was closed by its process, and is shown as root's.
    return int(uid) if state == _ESTABLISHED and inode else None


def _listed(family: int, theirs: Address, ours: Address) -> int | None:
    wanted = [_in_table(family, theirs), _in_table(family, ours), f"{_ESTABLISHED:02X}"]
    try:
        with Path(_TABLES[family]).open() as table:
            for line in table:
                columns = line.split()
                if columns[1:4] == wanted:
                    return int(columns[7]) if columns[9] != "0" else None
    except OSError as error:
        log.warning("socket_users_unknown", reason=str(error))
    return None


def _packed(family: int, host: str) -> bytes:
    return socket.inet_pton(family, host.partition("%")[0]).ljust(16, b"\0")


def _in_table(family: int, address: Address) -> str:
    """Address as the kernel prints it: words in the machine's byte order."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


def _unmapped() -> int:
    try:
        return int(OVERFLOW_UID_FILE.read_text())
    except OSError:
        return 65534
