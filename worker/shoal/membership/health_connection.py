"""HTTP connections of a process that may fork at any time: see shoal_proto.forks.openssl."""

import contextlib
import ssl
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpcore

from shoal_proto.forks.openssl import NO_FORK, secured_client, until_done
from shoal_proto.tls import identity
from shoal_proto.tls.names import COORDINATOR_NAME

CONNECT_S = 2.0
"""Limit of a TLS handshake, if the caller gives none."""


class ForkableBackend(httpcore.NetworkBackend):
    """Network backend over TCP with TLS connections that follow the rules of `NO_FORK`."""

    def __init__(self) -> None:
        self._plain = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return _Plain(self._plain.connect_tcp(host, port, timeout, local_address, socket_options))


class CoordinatorHttp:
    """Client that posts JSON to a coordinator, with the present certificate files and without
    proxies. One thread uses it, within `with`."""

    def __init__(self) -> None:
        self._context = _context()
        self._pool = _pool(self._context)

    def __enter__(self) -> "CoordinatorHttp":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.close()

    def post(self, url: str, content: bytes, limits: Mapping[str, float]) -> httpcore.Response:
        """Post to the coordinator; returns its response. Raises the errors of httpcore."""
        certificate = identity.own()
        if certificate is not None and (now := certificate.material.client) is not self._context:
            self._pool.close()
            self._context, self._pool = now, _pool(now)
        return self._pool.request(
            "POST",
            url,
            headers={"host": urlsplit(url).netloc, "content-type": "application/json"},
            content=content,
            # The certificate must be a coordinator's, and need not name its address.
            extensions={"timeout": limits, "sni_hostname": COORDINATOR_NAME},
        )


def _pool(context: ssl.SSLContext) -> httpcore.ConnectionPool:
    return httpcore.ConnectionPool(
        ssl_context=context, max_connections=1, network_backend=ForkableBackend()
    )


def _context() -> ssl.SSLContext:
    certificate = identity.own()
    if certificate is not None:
        return certificate.material.client
    # Without certificates: reading the system's takes 30 ms, and TLS is off.
    with NO_FORK:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Plain(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        connected = self._stream.get_extra_info("socket")
        with _errors(httpcore.ConnectTimeout, httpcore.ConnectError):
            within_s = CONNECT_S if timeout is None else timeout
            return _Encrypted(
                secured_client(connected, ssl_context, server_hostname or "", within_s)
            )

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Encrypted(httpcore.NetworkStream):
    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _errors(httpcore.ReadTimeout, httpcore.ReadError):
            return until_done(self._connection, lambda: self._connection.recv(max_bytes), timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        unsent = memoryview(buffer)
        with _errors(httpcore.WriteTimeout, httpcore.WriteError):
            while unsent:
                sent = until_done(self._connection, lambda: self._connection.send(unsent), timeout)  # noqa: B023
                unsent = unsent[sent:]

    def close(self) -> None:
        self._connection.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            # Between requests, a server sends only the end of the connection.
            try:
                self.read(1, timeout=0.0)
            except httpcore.ReadTimeout:
                return False
            except httpcore.ReadError:
                return True
            return True
        return self._connection if info == "socket" else None


@contextlib.contextmanager
def _errors(late: type[Exception], failed: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise failed(str(error)) from error
