"""uvicorn's server, with connections that are counted before anything is read from them."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import structlog
import uvicorn

from shoal_proto.errors import Overloaded
from shoal_proto.traces.log_limit import LogLimit
from shoal_server.serving.access.local_users import PEER_USER, user_of_peer
from shoal_server.serving.admission.config import HttpLimits
from shoal_server.serving.admission.connections import ConnectionCounts, accepted
from shoal_server.serving.tasks import SupervisedTasks, cancel
from shoal_server.status.http.protocol import BoundedProtocol, raw_answer

log = structlog.get_logger(__name__)

SEND_BUFFER_BYTES = 256 * 1024
"""Size of a connection's send buffer in the kernel: a client that does not read is noticed once
this buffer is full."""


class BoundedServer(uvicorn.Server):
    """Server that reports when it serves, leaves signals to its process, and accepts connections
    itself."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        limits: HttpLimits,
        counts: ConnectionCounts,
    ) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()
        self._listener = listener
        self._limits = limits
        self._counts = counts
        self._of_strangers = LogLimit(log)
        self._connections = SupervisedTasks()
        self._accepting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        # uvicorn gets no listening socket: `_accept` passes it each connection.
        self.servers = []
        self._accepting = asyncio.create_task(self._accept(), name="http-accept")
        self.started = True
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            await cancel(self._accepting)
        self._listener.close()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._connections.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def _accept(self) -> None:
        async for connected, address in accepted(self._listener, "http"):
            peer = str(address[0])
            if why := self._counts.refusal(connected, peer):
                _refuse(connected, why, is_plain=self.config.ssl is None)
            else:
                self._connections.start(self._hold(connected, peer), name="http-connection")

    async def _hold(self, connected: socket.socket, peer: str) -> None:
        protocol = BoundedProtocol(
            self._limits,
            self._counts,
            config=self.config,
            server_state=self.server_state,
            app_state={**self.lifespan.state, PEER_USER: user_of_peer(connected)},
        )
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        tls = self.config.ssl
        with self._counts.open(peer):
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: protocol,
                    connected,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else self._limits.http_request_s,
                )
            except OSError as error:
                self._counts.count_closed("failed handshakes")
                self._of_strangers.info("http_handshake_failed", peer=peer, reason=str(error))
                return
            await protocol.lost.wait()


def _refuse(connected: socket.socket, why: str, *, is_plain: bool) -> None:
    with connected:
        connected.setblocking(False)
        if not is_plain:
            return
        try:
            # These bytes fit into the empty send buffer of a new connection.
            connected.send(raw_answer(503, Overloaded(why, fix="Ask again a little later.")))
        except OSError as error:
            log.debug("refusal_not_sent", reason=str(error))
