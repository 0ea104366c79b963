"""Set-up of shared memory between the ranks of a group, if all of them are on one machine.

Rank 0 announces the random name of a Unix socket in a collective. The name is also the key that
each other rank has to send over the socket. Rank 0 then sends the memory's descriptors. Either all
ranks share the memory or none does.

The barriers' memory is always new: a late `cut` of a past generation posts to the old memory.

A rank's message in the collective: an id of its host, the socket's name (zeros except on rank 0),
and the id of the region that it kept.
"""

import hashlib
import mmap
import os
import secrets
import selectors
import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, cast

import structlog
import torch.distributed as dist

from shoal.backends.abortable.gather import gather_padded
from shoal.backends.shared_memory.links import PeerSockets
from shoal.backends.shared_memory.memory import SharedMemory, head_bytes, initialise
from shoal.backends.shared_memory.regions import ID_BYTES, NO_REGION, KeptRegions, MemoryRegion
from shoal.backends.shared_memory.semaphores import available
from shoal_client.connection.transport import transport_of

log = structlog.get_logger(__name__)

OPEN_S = 2.0
"""Time within which all ranks must have mapped the memory."""
DECISION_S = 10.0
"""Limit of a rank's wait for rank 0's decision. It is longer than rank 0 takes."""
MAX_SILENT = 256
"""Limit of connections without a complete greeting; above it the oldest is closed."""
_HOST_BYTES, _NAME_BYTES = 32, 32
GREETING = struct.Struct("=I32s")
"""A rank's first message: its number, and the key."""
_REGION = struct.Struct(f"=Q{ID_BYTES}s")
"""The region's size and id, sent with the descriptors of barriers and region."""
_DONE, _AGREED = b"D", b"A"


@dataclass(frozen=True, kw_only=True)
class _Opened:
    head: mmap.mmap
    region: MemoryRegion
    connections: list[socket.socket]


def share_memory(
    group: dist.ProcessGroup, num_bytes: int, limit_s: float, kept: KeptRegions | None = None
) -> SharedMemory | None:
    """Return memory of this size that all ranks of the group share. Collective.

    Returns None, on all ranks alike, if they are not on one machine, if not all have mapped it
    within OPEN_S, or if SHOAL_TRANSPORT excludes it.

    `limit_s`: time limit of each barrier. The first region in `kept` is reused, with its old
    contents, if all ranks have it, its size `fits` and no other process may write to it. `close`
    adds the memory's region to `kept`. Raises RuntimeError as the group's collectives do, and
    InvalidSpec for an unknown SHOAL_TRANSPORT.
    """
    old = kept.take() if kept is not None else None
    opened = None
    try:
        opened = _open(group, num_bytes, old)
    finally:
        if old is not None and (opened is None or opened.region is not old):
            old.close()
    if opened is None:
        return None
    region = opened.region
    memory = SharedMemory(
        opened.head,
        memoryview(region.mapped)[:num_bytes],
        group.rank(),
        group.size(),
        limit_s,
    )
    on_left = region.close if kept is None else partial(kept.keep, region)
    memory.watch(PeerSockets(opened.connections, memory.cut), on_left)
    return memory


def _open(group: dist.ProcessGroup, num_bytes: int, old: MemoryRegion | None) -> _Opened | None:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    with ExitStack() as stack:
        listener, name = _new_listener(stack) if rank == 0 else (None, bytes(_NAME_BYTES))
        own = _host() + name + (old.region_id if old is not None else NO_REGION)
        items = gather_padded(own, len(own), group)
        hosts = {message[:_HOST_BYTES] for message in items}
        name = items[0][_HOST_BYTES:-ID_BYTES]
        if len(hosts) > 1 or not any(name) or not any(items[0][:_HOST_BYTES]):
            return None
        if len({message[-ID_BYTES:] for message in items}) > 1:
            old = None
        try:
            if listener is not None:
                return serve(listener, name, world_size, _region_for(num_bytes, old))
            return receive(name, rank, old)
        except (OSError, _Refused) as error:
            log.warning("no_shared_memory", rank=rank, num_bytes=num_bytes, reason=repr(error))
            return None


def _region_for(num_bytes: int, old: MemoryRegion | None) -> MemoryRegion:
    if old is not None and old.fits(num_bytes) and old.has_no_other_writer():
        old.acquire()
        return old
    return MemoryRegion.create(num_bytes)


class _Refused(Exception):
    """Raised if the other end does not follow the protocol."""


def _host() -> bytes:
    """Return an id that is equal in two processes only if they can share memory. Zeros: this
    process cannot share memory."""
    if not available() or transport_of(None) != "auto":
        return bytes(_HOST_BYTES)
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespace = Path("/proc/self/ns/net").stat().st_ino
    except OSError as error:
        log.info("no_shared_memory", reason=repr(error))
        return bytes(_HOST_BYTES)
    return hashlib.sha256(machine + f"{namespace} {os.getuid()}".encode()).digest()


def _new_listener(stack: ExitStack) -> tuple[socket.socket | None, bytes]:
    name = secrets.token_bytes(_NAME_BYTES)
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(socket_address(name))
        listener.listen(128)
    except OSError as error:
        log.info("no_shared_memory", reason=repr(error))
        return None, bytes(_NAME_BYTES)
    return listener, name


def socket_address(name: bytes) -> str:
    """Return the address of rank 0's socket."""
    # Any process can list addresses of sockets: the address has only half of the key.
    return f"\0shoal-ranks-{name[: _NAME_BYTES // 2].hex()}"


def serve(listener: socket.socket, name: bytes, world_size: int, region: MemoryRegion) -> _Opened:
    """Make the barriers' memory, and send it and the region to all other ranks. Rank 0 calls this.

    `name`: the key that ranks must send. Raises _Refused, and OSError, also if a rank is late.
    """
    deadline_s = time.monotonic() + OPEN_S
    with ExitStack() as stack:
        descriptor = os.memfd_create("shoal-ranks", os.MFD_CLOEXEC)
        stack.callback(os.close, descriptor)
        os.ftruncate(descriptor, head_bytes(world_size))
        head = mmap.mmap(descriptor, head_bytes(world_size))
        initialise(head, world_size)
        message = _REGION.pack(region.num_bytes, region.region_id), [descriptor, region.descriptor]
        by_rank: dict[int, socket.socket] = {}
        with _Greetings(listener, name) as greetings:
            while len(by_rank) < world_size - 1:
                rank, connection = greetings.next(deadline_s)
                stack.enter_context(connection)
                connection.settimeout(_remaining_s(deadline_s))
                socket.send_fds(connection, [message[0]], message[1])
                by_rank[rank] = connection
        for connection in by_rank.values():
            connection.settimeout(_remaining_s(deadline_s))
            if connection.recv(1) != _DONE:
                raise _Refused("a rank did not confirm that it has mapped the memory")
        for connection in by_rank.values():
            connection.sendall(_AGREED)
        connections = [connection.dup() for connection in by_rank.values()]
    return _Opened(head=head, region=region, connections=connections)


class _Greetings:
    """Greetings of ranks that have the key, in order of arrival.

    Any process can connect, but without the key it cannot delay the ranks.
    """

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytes] = {}

    def __enter__(self) -> Self:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for connection in self._received:
            connection.close()

    def next(self, deadline_s: float) -> tuple[int, socket.socket]:
        """Return the next rank and its connection. Raises TimeoutError after the deadline."""
        while time.monotonic() < deadline_s:
            for ready, _ in self._selector.select(_remaining_s(deadline_s)):
                if ready.fileobj is self._listener:
                    self._accept()
                    continue
                connection = cast(socket.socket, ready.fileobj)
                if connection in self._received and self._read(connection):
                    rank, key = GREETING.unpack(self._received[connection])
                    if secrets.compare_digest(key, self._key):
                        self._forget(connection)
                        return rank, connection
                    self._refuse(connection, "another key")
        raise TimeoutError("not all ranks asked for the memory")

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except BlockingIOError:
            return
        connection.setblocking(False)
        if len(self._received) >= MAX_SILENT:
            self._refuse(next(iter(self._received)), "no greeting yet, and too many connections")
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> bool:
        """Read from the connection; return True if its greeting is complete."""
        received = self._received[connection]
        try:
            piece = connection.recv(GREETING.size - len(received))
        except BlockingIOError:
            return False
        except OSError as error:
            self._refuse(connection, repr(error))
            return False
        if not piece:
            self._refuse(connection, "closed before its greeting")
            return False
        self._received[connection] = received + piece
        return len(received) + len(piece) == GREETING.size

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        # If this was a rank, the set-up ends without shared memory at the deadline.
        log.warning("greeting_refused", reason=reason)
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._received[connection]


def receive(name: bytes, rank: int, old: MemoryRegion | None) -> _Opened:
    """Map the memory that rank 0 sends. All ranks except rank 0 call this.

    `old`: a region to reuse, if rank 0 sends it. Raises OSError or _Refused if no rank uses the
    memory, and RuntimeError if rank 0 does not decide within DECISION_S.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        # With Python's timeout, `connect` would fail at once on a full backlog.
        limit = struct.pack("@ll", int(OPEN_S), int(OPEN_S % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(socket_address(name))
        connection.settimeout(OPEN_S)
        connection.sendall(GREETING.pack(rank, name))
        data, descriptors, _, _ = socket.recv_fds(connection, _REGION.size, 2)
        try:
            if len(data) < _REGION.size or len(descriptors) < 2:
                raise _Refused("rank 0 closed the connection before it sent the memory")
            num_bytes, region_id = _REGION.unpack(data)
            head = mmap.mmap(descriptors[0], 0)
            if old is not None and old.region_id == region_id:
                old.acquire()
                region = old
            else:
                region = MemoryRegion(descriptors[1], region_id, num_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.sendall(_DONE)
        connection.settimeout(DECISION_S)
        try:
            decision = connection.recv(1)
        except TimeoutError as error:
            raise RuntimeError("rank 0 did not decide if ranks share memory") from error
        if decision != _AGREED:
            raise _Refused("rank 0 did not confirm that all ranks have the memory")
        return _Opened(head=head, region=region, connections=[connection.dup()])


def _remaining_s(deadline_s: float) -> float:
    """Return the remaining time; never 0, which would mean non-blocking."""
    return max(deadline_s - time.monotonic(), 0.001)
