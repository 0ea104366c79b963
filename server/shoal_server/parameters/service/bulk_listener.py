"""The listener for bulk connections: a TCP port, and a Unix socket with an abstract name."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import structlog

from shoal_proto import bulk
from shoal_proto.bulk import MAX_ARENA_BYTES, FrameKind
from shoal_proto.errors import AddressInUse, MalformedMessage, Overloaded, ShoalError
from shoal_proto.tls.bulk_offers import BulkOffers, PermittedUse
from shoal_server.parameters.bulk.arena import SharedArena
from shoal_server.parameters.bulk.encryption import encrypted
from shoal_server.parameters.bulk.wire import FrameConnection, PeerHungUp
from shoal_server.parameters.service.bulk_connection import BulkServerConnection, BulkServices
from shoal_server.parameters.shard.memory import Memory
from shoal_server.serving.admission import descriptors
from shoal_server.serving.admission.connections import accepted
from shoal_server.serving.tasks import SupervisedTasks, running

log = structlog.get_logger(__name__)

HELLO_S = 5.0
MAX_CONNECTIONS = 4096
# The kernel ends a connection after 25 s of silence: the client's machine has vanished.
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class BulkListener:
    """Accepts bulk connections that present a key from `offers`."""

    def __init__(
        self,
        calls: BulkServices,
        offers: BulkOffers,
        memory: Memory,
        *,
        most: int = MAX_CONNECTIONS,
    ) -> None:
        """`most`: bound on open connections."""
        self._most = most
        self._calls = calls
        self._offers = offers
        self._memory = memory
        self._connections = SupervisedTasks()

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[None]:
        """Accept connections during the block. Raises AddressInUse if the port is taken."""
        with ExitStack() as stack:
            remote = stack.enter_context(_bound(host, port))
            local, name = _named(stack)
            listeners = [remote, local] if local is not None else [remote]
            for listener in listeners:
                listener.listen(128)
                listener.setblocking(False)
            accepting = [self._accept(listener) for listener in listeners]
            self._offers.listening(name, remote.getsockname()[1])
            async with self._connections, running(*accepting):
                try:
                    yield
                finally:
                    self._offers.listening("", 0)

    async def _accept(self, listener: socket.socket) -> None:
        # Clients use gRPC while no connection is accepted.
        async for connected, _ in accepted(listener, "bulk"):
            is_reserved = descriptors.is_reserved(connected.fileno())
            if is_reserved or len(self._connections) >= self._most:
                log.warning("bulk_connection_refused", num_connections=len(self._connections))
                connected.close()
                continue
            self._connections.start(self._serve(connected), name="bulk-connection")

    async def _serve(self, connected: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(connected.close)
            connected.setblocking(False)
            is_local = connected.family == socket.AF_UNIX
            try:
                async with asyncio.timeout(HELLO_S):
                    if not is_local:
                        _tune(connected)
                        connected = await encrypted(connected)
                        stack.callback(connected.close)
                    wire = FrameConnection(connected, first=FrameKind.HELLO)
                    hello = await self._greeted(wire)
                arena = self._arena(hello, stack) if is_local and hello.arena_bytes else None
                await _welcome(wire, arena)
            except (OSError, PeerHungUp, ShoalError) as error:
                log.warning("bulk_connection_refused", reason=repr(error))
                return
            await BulkServerConnection(wire, self._calls, arena, hello.use).serve()

    async def _greeted(self, wire: FrameConnection) -> "_Hello":
        frame = await wire.next_frame()
        use = self._offers.redeem(bytes(frame.body))
        if use is None:
            raise MalformedMessage(
                "the key of a bulk connection is not valid",
                seen="a HELLO with an unknown, used or expired key",
                expected="an unused key that this server has issued and that has not expired",
            )
        return _Hello(
            use=use,
            arena_bytes=min(frame.at, MAX_ARENA_BYTES),
        )

    def _arena(self, hello: "_Hello", stack: ExitStack) -> SharedArena | None:
        # If the system has no memory, the claim is released at once.
        with ExitStack() as claims:
            try:
                what = "memory shared with a client"
                claims.enter_context(self._memory.reserve(hello.arena_bytes, what))
                arena = SharedArena(hello.arena_bytes)
            except (Overloaded, OSError) as error:
                log.warning("no_shared_memory", num_bytes=hello.arena_bytes, reason=str(error))
                return None
            stack.enter_context(claims.pop_all())
        return arena


@dataclass(frozen=True, kw_only=True)
class _Hello:
    use: PermittedUse
    arena_bytes: int
    """Size of the shared memory; 0 if the client wants none."""


async def _welcome(wire: FrameConnection, arena: SharedArena | None) -> None:
    if arena is None:
        await wire.send(bulk.header(FrameKind.HELLO))
        return
    try:
        # A fresh connection has room for these bytes.
        answer = bulk.header(FrameKind.HELLO, at=arena.num_bytes)
        socket.send_fds(wire.socket, [answer], [arena.descriptor])
    except OSError as error:
        raise PeerHungUp(repr(error)) from error
    finally:
        arena.close_descriptor()


def _named(stack: ExitStack) -> tuple[socket.socket | None, str]:
    """Return a Unix socket and its random abstract name; None and an empty name if the system has
    no abstract names."""
    name = f"shoal-{secrets.token_hex(16)}"
    try:
        local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        local.bind(f"\0{name}")
    except OSError as error:
        log.info("no_local_bulk_connections", reason=str(error))
        return None, ""
    return local, name


def _bound(host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise AddressInUse(
            f"cannot listen on {host}:{port} for bulk connections",
            seen=str(error),
            expected="a free port",
            fix="Choose another --bulk-port; port 0 takes any free one.",
        ) from error
    return bound


def _tune(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
