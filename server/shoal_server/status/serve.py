"""HTTP inside an event loop that somebody else runs."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import TracebackType

import uvicorn
from fastapi import FastAPI

from shoal_proto.errors import AddressInUse
from shoal_server.serving.tasks import wait_first

BACKLOG = 128
STOP_WITHIN_S = 2


class StatusServer:
    """Serves the app between `async with` and its end.

    The port is bound on entry: a busy one raises AddressInUse before anything else happens, and
    port 0 takes a free one. Signals are left to the process' own handlers.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that is served on, known once entered."""
        return self._port

    @property
    def url(self) -> str:
        """Base URL for somebody on this machine; a wildcard address is shown as loopback."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._host, self._host)
        return f"http://{host}:{self._port}"

    async def __aenter__(self) -> "StatusServer":
        listener = _bind(self._host, self._port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=STOP_WITHIN_S,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([listener]), name="status-http")
        await wait_first(self._server.serving.wait(), self._task)
        if not self._server.serving.is_set():
            listener.close()
            await self._task  # raises what kept it from starting
        await self._app.state.loop_lag.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None and self._task is not None
        self._app.state.closing.event.set()
        self._server.should_exit = True
        await self._app.state.loop_lag.__aexit__(kind, error, traceback)
        await self._task


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it serves and leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
