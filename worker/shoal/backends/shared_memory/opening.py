"""How the ranks of a group come to share memory, if all of them are on one machine.

Rank 0 makes it, and hands it to the others over a socket whose name and key it has told them in a
collective of the group. Either all of them share it or none does.
"""

import hashlib
import mmap
import os
import secrets
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import structlog
import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import wait_abortable
from shoal.backends.shared_memory.links import Links
from shoal.backends.shared_memory.memory import SharedMemory, head_bytes, initialise
from shoal.backends.shared_memory.semaphores import available
from shoal_client.bulk.way import transport_of

log = structlog.get_logger(__name__)

OPEN_S = 2.0
"""Where the ranks do not have the memory within this time, none of them uses it."""
_PLACE_BYTES, _NAME_BYTES = 32, 32
_GREETING = struct.Struct("=I32s")
_DONE, _AGREED = b"D", b"A"


def share_memory(group: dist.ProcessGroup, num_bytes: int, limit_s: float) -> SharedMemory | None:
    """Collective: so many bytes for all ranks of the group, plus what their meetings take; None, on
    every rank alike, where they are not on one machine or it gives no such memory.

    A rank waits for the others at most `limit_s` at each meeting. Raises RuntimeError as the
    group's collectives do, and InvalidSpec for an unknown SHOAL_TRANSPORT.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with ExitStack() as stack:
        listener, name = _named(stack) if rank == 0 else (None, bytes(_NAME_BYTES))
        own = torch.frombuffer(bytearray(_place() + name), dtype=torch.uint8)
        told = [torch.empty_like(own) for _ in range(world_size)]
        wait_abortable(dist.all_gather(told, own, group=group, async_op=True), group)
        words = [bytes(each.tolist()) for each in told]
        places = {word[:_PLACE_BYTES] for word in words}
        name = words[0][_PLACE_BYTES:]
        if len(places) > 1 or not any(name) or not any(words[0][:_PLACE_BYTES]):
            return None
        try:
            if listener is not None:
                mapped, connections = _hand_out(listener, name, world_size, num_bytes)
            else:
                mapped, connections = _receive(name, rank)
        except (OSError, _Refused) as error:
            log.warning("no_shared_memory", rank=rank, num_bytes=num_bytes, reason=repr(error))
            return None
    memory = SharedMemory(mapped, rank, world_size, limit_s)
    memory.watch(Links(connections, memory.cut))
    return memory


class _Refused(Exception):
    """The other end does not do as agreed."""


def _place() -> bytes:
    """The same for processes that can share memory, and for no others; zeros: it shares none."""
    if not available() or transport_of(None) != "auto":
        return bytes(_PLACE_BYTES)
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = Path("/proc/self/ns/net").stat().st_ino
    except OSError as error:
        log.info("no_shared_memory", reason=repr(error))
        return bytes(_PLACE_BYTES)
    return hashlib.sha256(machine + f"{namespace} {os.getuid()}".encode()).digest()


def _named(stack: ExitStack) -> tuple[socket.socket | None, bytes]:
    """A socket with a name that nobody can guess; zeros where the system has no such names."""
    name = secrets.token_bytes(_NAME_BYTES)
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(_address(name))
        listener.listen(128)
    except OSError as error:
        log.info("no_shared_memory", reason=repr(error))
        return None, bytes(_NAME_BYTES)
    return listener, name


def _address(name: bytes) -> str:
    # The first half only: names of sockets can be listed by anybody, the key is what remains.
    return f"\0shoal-ranks-{name[: _NAME_BYTES // 2].hex()}"


def _hand_out(
    listener: socket.socket, name: bytes, world_size: int, num_bytes: int
) -> tuple[mmap.mmap, list[socket.socket]]:
    deadline_s = time.monotonic() + OPEN_S
    with ExitStack() as stack:
        descriptor = os.memfd_create("shoal-ranks", os.MFD_CLOEXEC)
        stack.callback(os.close, descriptor)
        size = head_bytes(world_size) + num_bytes
        os.ftruncate(descriptor, size)
        mapped = mmap.mmap(descriptor, size)
        initialise(mapped, world_size)
        by_rank: dict[int, socket.socket] = {}
        while len(by_rank) < world_size - 1:
            listener.settimeout(_left(deadline_s))
            connection = stack.enter_context(listener.accept()[0])
            connection.settimeout(_left(deadline_s))
            try:
                rank, key = _GREETING.unpack(_read(connection, _GREETING.size))
            except (OSError, _Refused) as error:
                # Whoever it was has the name only; a rank that is lost is missed at the deadline.
                log.warning("greeting_refused", reason=repr(error))
                continue
            if secrets.compare_digest(key, name):
                socket.send_fds(connection, [struct.pack("=Q", size)], [descriptor])
                by_rank[rank] = connection
        for connection in by_rank.values():
            connection.settimeout(_left(deadline_s))
            if _read(connection, 1) != _DONE:
                raise _Refused("a rank could not map the memory")
        for connection in by_rank.values():
            connection.sendall(_AGREED)
        connections = [connection.dup() for connection in by_rank.values()]
    return mapped, connections


def _receive(name: bytes, rank: int) -> tuple[mmap.mmap, list[socket.socket]]:
    deadline_s = time.monotonic() + OPEN_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(OPEN_S)
        connection.connect(_address(name))
        connection.sendall(_GREETING.pack(rank, name))
        told, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
        try:
            if len(told) < 8 or not descriptors:
                raise _Refused("rank 0 hung up")
            mapped = mmap.mmap(descriptors[0], struct.unpack("=Q", told)[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.sendall(_DONE)
        connection.settimeout(_left(deadline_s))
        if _read(connection, 1) != _AGREED:
            raise _Refused("rank 0 decided against it")
        return mapped, [connection.dup()]


def _read(connection: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        piece = connection.recv(size - len(read))
        if not piece:
            raise _Refused("the other end hung up")
        read += piece
    return read


def _left(deadline_s: float) -> float:
    """For a socket's timeout, which is not to become 0: that means not to wait at all."""
    return max(deadline_s - time.monotonic(), 0.001)
