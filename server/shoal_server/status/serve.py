"""HTTP server of the status app on an event loop that runs already."""

import asyncio
import socket
import ssl
from types import TracebackType

import uvicorn
from fastapi import FastAPI

from shoal_proto.errors import AddressInUse
from shoal_proto.tls import identity
from shoal_server.serving.options import HttpClients
from shoal_server.serving.tasks import wait_first
from shoal_server.status.http.bounds import HttpBounds
from shoal_server.status.http.server import BoundedServer

BACKLOG = 128
STOP_WITHIN_S = 2


def scheme_for(clients: HttpClients) -> str:
    """URL scheme of a page with such callers: http or https."""
    return "http" if identity.own() is None or clients == "user" else "https"


class StatusServer:
    """Serves the app during its `async with` block.

    The port is bound on entry, which raises AddressInUse; port 0 takes a free one. Over TLS callers
    need a certificate, unless `clients` is "token"; with "user" there is no TLS. The app must check
    callers without a certificate by other means.

    With `certified_host`, the app is served there as well, on a free port, over TLS to callers with
    a certificate.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str,
        port: int,
        *,
        clients: HttpClients = "certificate",
        certified_host: str | None = None,
    ) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._clients = clients
        self._certified_host = certified_host
        self._certified_port = 0
        self._serving: list[tuple[BoundedServer, asyncio.Task[None]]] = []

    @property
    def port(self) -> int:
        """Port that the server listens on; known inside the block."""
        return self._port

    @property
    def certified_port(self) -> int:
        """Port at `certified_host`; 0 without one. Known inside the block."""
        return self._certified_port

    @property
    def url(self) -> str:
        """Base URL for callers on this machine; a wildcard address is shown as loopback."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"{scheme_for(self._clients)}://{host}:{self._port}"

    async def __aenter__(self) -> "StatusServer":
        # The app may have been served before.
        self._app.state.bounds.streams.closing = asyncio.Event()
        try:
            self._port = await self._serve(self._host, self._port, self._clients)
            if self._certified_host is not None:
                self._certified_port = await self._serve(self._certified_host, 0, "certificate")
        except BaseException:
            await self._stop()
            raise
        await self._app.state.loop_lag.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._app.state.loop_lag.__aexit__(kind, error, traceback)
        await self._stop()

    async def _serve(self, host: str, port: int, clients: HttpClients) -> int:
        listener = _bind(host, port)
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            # uvicorn would log each bad request, and strangers may send any number.
            log_level="critical",
            access_log=False,
            server_header=False,
            http="h11",
            ws="none",
            timeout_graceful_shutdown=STOP_WITHIN_S,
        )
        config.load()
        config.ssl = _tls(clients)
        bounds: HttpBounds = self._app.state.bounds
        server = BoundedServer(config, listener, bounds.limits, bounds.connections)
        task = asyncio.create_task(server.serve(), name="status-http")
        await wait_first(server.serving.wait(), task)
        if not server.serving.is_set():
            listener.close()
            await task  # raises the error that prevented the start
        self._serving.append((server, task))
        port_bound: int = listener.getsockname()[1]
        return port_bound

    async def _stop(self) -> None:
        self._app.state.bounds.streams.closing.set()
        for server, _ in self._serving:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._serving))
        self._serving.clear()


def _tls(clients: HttpClients) -> ssl.SSLContext | None:
    """TLS context; None without a certificate, or if `clients` is "user". A renewed certificate is
    used from the next handshake on."""
    own = identity.own()
    if own is None or clients == "user":
        return None

    def now() -> ssl.SSLContext:
        return own.material.server if clients == "certificate" else own.material.open

    # The listener keeps its first context; each handshake switches to the current one.
    context = now()

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = now()

    context.sni_callback = renew
    return context


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressInUse(
            f"cannot serve HTTP on {host}:{port}",
            seen=error.strerror or str(error),
            expected="a free port of this machine",
            fix="Stop what listens there, or choose another port; port 0 takes any free one.",
        ) from error
    listener.setblocking(False)
    return listener
