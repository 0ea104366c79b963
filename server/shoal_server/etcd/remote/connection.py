"""Connections to etcd's endpoints, and two ways to call.

A repeatable call goes from endpoint to endpoint until one answers or the time is up. An
at-most-once call needs an established connection, and is repeated only if etcd certainly did not
carry it out.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc
import grpc.aio
import structlog

from shoal_proto.back_off import BackOff
from shoal_proto.errors import InvalidSpec, RefusedError, ShoalError
from shoal_proto.etcd import etcd_pb2 as pb
from shoal_proto.traces import tracing
from shoal_server.etcd import keys
from shoal_server.etcd.remote.channel import EtcdConnection
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.etcd.remote.failures import (
    LOGIN_REFUSED,
    Failure,
    Remedy,
    classify,
    unreachable,
)
from shoal_server.serving.tasks import SupervisedTasks

log = structlog.get_logger(__name__)

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

# With this, an etcd member that is cut off from its cluster refuses at once.
REQUIRE_LEADER: Metadata = (("hasleader", "true"),)
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
MAX_LOGINS = 3


@dataclass(frozen=True, slots=True)
class Attempt:
    connection: EtcdConnection
    metadata: Metadata
    timeout_s: float


class Connections:
    """The endpoints of one cluster. Calls go to the current one, until it fails."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._open: dict[str, EtcdConnection] = {}
        self._index = 0
        self._credentials: grpc.ChannelCredentials | None = None
        self._stamps: list[tuple[int, int]] = []
        """Modification time and inode of each credentials file read."""
        self.token: str | None = None
        """None if the next call must log in; empty if etcd wants no token."""
        self._login_lock = asyncio.Lock()
        self._password = ""
        """Password of the last login that etcd accepted."""
        self._closing = SupervisedTasks()
        self._closed = False

    @property
    def current(self) -> EtcdConnection:
        """Connection for calls. Raises RefusedError after `close`, and InvalidSpec if the TLS files
        were never readable."""
        if self._closed:
            raise _closed()
        address = self.config.endpoints[self._index]
        credentials = self.load_credentials()
        found = self._open.get(address)
        if found is not None and found.credentials is not credentials and not found.is_connected:
            # The connection would present the former certificate for ever.
            self.replace(found)
            found = None
        if found is None:
            found = self._open[address] = EtcdConnection(address, credentials)
        return found

    def switch_endpoint(self, failed: str) -> None:
        if self.config.endpoints[self._index] == failed:
            self._index = (self._index + 1) % len(self.config.endpoints)

    def replace(self, connection: EtcdConnection) -> None:
        """Drop a connection, so that the next call opens a new one.

        Calls in progress get `attempt_timeout_s` to end.
        """
        if self._open.get(connection.address) is connection:
            del self._open[connection.address]
            self._closing.start(self._close_later(connection))

    async def _close_later(self, connection: EtcdConnection) -> None:
        try:
            await asyncio.sleep(self.config.attempt_timeout_s)
        finally:
            await connection.close()

    async def close(self) -> None:
        self._closed = True
        await self._closing.close()
        while self._open:
            _, connection = self._open.popitem()
            await connection.close()

    @contextmanager
    def cancel_as_failure(self, connection: EtcdConnection) -> Iterator[None]:
        """Turn a CancelledError into an error of the call if the caller's task was not cancelled.

        gRPC raises CancelledError when a channel is closed, and for a stream that cannot be
        written.
        """
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._closed:
                raise _closed() from None
            details = "the connection was given up" if connection.closed else "gRPC gave it up"
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, details=details) from None

    async def call(self, attempt: Callable[[Attempt], Awaitable[T]]) -> T:
        """Repeat the attempt at one endpoint after the other.

        Raises etcd's refusal, Unavailable after `timeout_s`, RefusedError once closed, and
        InvalidSpec if the TLS files were never readable.
        """
        with tracing.child_span("etcd"):
            return await self._repeated(attempt)

    async def _repeated(self, attempt: Callable[[Attempt], Awaitable[T]]) -> T:
        retry = _Retry(self)
        while True:
            connection, token = self.current, self.token
            try:
                with self.cancel_as_failure(connection):
                    metadata = await self.metadata(connection)
                    token = self.token
                    limit_s = min(self.config.attempt_timeout_s, retry.left_s())
                    return await attempt(Attempt(connection, metadata, limit_s))
            except grpc.RpcError as error:
                await retry.after(connection, self.failure_of(error, connection.address), token)

    async def call_once(self, attempt: Callable[[Attempt], Awaitable[T]]) -> T:
        """Send a request once; again only if etcd certainly did not carry it out.

        For an unknown outcome, the error's `details["outcome"]` is "unknown", except for the
        RefusedError of a client closed meanwhile. Otherwise raises what `call` raises.
        """
        with tracing.child_span("etcd, once"):
            return await self._at_most_once(attempt)

    async def _at_most_once(self, attempt: Callable[[Attempt], Awaitable[T]]) -> T:
        retry = _Retry(self)
        while True:
            if not self.current.is_connected:
                await self.call(self._probe)
            connection = self.current
            try:
                with self.cancel_as_failure(connection):
                    metadata = await self.metadata(connection)
            except grpc.RpcError as error:
                await retry.after(connection, self.failure_of(error, connection.address), None)
                continue
            token = self.token
            try:
                with self.cancel_as_failure(connection):
                    return await attempt(Attempt(connection, metadata, retry.left_s()))
            except grpc.RpcError as error:
                failure = self.failure_of(error, connection.address)
                if not failure.untouched:
                    self.switch_endpoint(connection.address)
                    raise _unknown_outcome(failure.error) from error
                await retry.after(connection, failure, token)

    async def _probe(self, attempt: Attempt) -> None:
        # The user's role covers this key.
        key = (self.config.prefix + keys.LEADER).encode()
        request = pb.RangeRequest(key=key, count_only=True)
        await attempt.connection.kv.Range(
            request, timeout=attempt.timeout_s, metadata=attempt.metadata
        )

    def failure_of(self, error: grpc.RpcError, address: str) -> Failure:
        """Classify a failed call to the endpoint. After a login that etcd accepted, a refused one
        is an outage: the operator changes the password in etcd and in the file, one after the
        other."""
        failure = classify(error, address, self.config.prefix)
        if self._password and LOGIN_REFUSED in (error.details() or ""):
            return replace(failure, remedy=Remedy.ELSEWHERE)
        return failure

    async def metadata(self, connection: EtcdConnection) -> Metadata:
        """Metadata of a call, after a login if needed. Raises grpc.RpcError."""
        if not self.config.user:
            return REQUIRE_LEADER
        async with self._login_lock:
            if self.token is None:
                self.token = await self._login(connection)
        return (*REQUIRE_LEADER, ("token", self.token)) if self.token else REQUIRE_LEADER

    def known_metadata(self) -> Metadata | None:
        """Metadata of a call; None if a login is due. Any thread may call it."""
        token = self.token
        if not self.config.user:
            return REQUIRE_LEADER
        if token is None:
            return None
        return (*REQUIRE_LEADER, ("token", token)) if token else REQUIRE_LEADER

    def forget(self, token: str | None) -> None:
        """Discard a token, so that the next call logs in. Ignored if it was replaced already."""
        if self.token == token:
            self.token = None

    async def _login(self, connection: EtcdConnection) -> str:
        try:
            password = self.config.read_password()
        except InvalidSpec as error:
            log.warning("etcd_password_not_read", reason=str(error))
            password = self._password
        request = pb.AuthenticateRequest(name=self.config.user, password=password)
        try:
            reply = await connection.auth.Authenticate(
                request, timeout=self.config.attempt_timeout_s, metadata=REQUIRE_LEADER
            )
        except grpc.RpcError as error:
            if "authentication is not enabled" not in (error.details() or ""):
                raise
            log.warning("etcd_login_skipped", reason="etcd has authentication switched off")
            return ""
        self._password = password
        log.info("etcd_logged_in", user=self.config.user, endpoint=connection.address)
        return str(reply.token)

    def load_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials from the current files; the same object until they change, or while they
        cannot be read. None without TLS. Raises InvalidSpec if the files were never readable."""
        if self.config.ca_file is None:
            return None
        files = (self.config.ca_file, self.config.key_file, self.config.cert_file)
        try:
            found = [file.stat() for file in files if file]
            stamps = [(each.st_mtime_ns, each.st_ino) for each in found]
            if self._credentials is None or stamps != self._stamps:
                ca, key, cert = (file.read_bytes() if file else None for file in files)
                self._credentials = grpc.ssl_channel_credentials(ca, key, cert)
                self._stamps = stamps
        except OSError as error:
            if self._credentials is None:
                raise InvalidSpec(
                    "cannot read a TLS file for etcd", seen=str(error), expected="a PEM file"
                ) from error
            log.warning("etcd_certificate_not_renewed", reason=str(error))
        return self._credentials


class _Retry:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._config = connections.config
        self._clock = asyncio.get_running_loop().time
        self._deadline_s = self._clock() + self._config.timeout_s
        self._seen: dict[str, str] = {}
        self._failures = 0
        self._pauses = BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._logins = 0

    def left_s(self) -> float:
        return max(self._deadline_s - self._clock(), 0.001)

    async def after(self, connection: EtcdConnection, failure: Failure, token: str | None) -> None:
        """Prepare the next attempt, or raise. `token`: the failed attempt's."""
        if failure.remedy is Remedy.NONE:
            raise failure.error
        if failure.remedy is Remedy.LOGIN:
            self._logins += 1
            if not self._config.user or self._logins >= MAX_LOGINS:
                raise failure.error
            self._connections.forget(token)
            return
        self._seen[connection.address] = failure.error.seen or failure.error.what
        self._connections.switch_endpoint(connection.address)
        self._failures += 1
        # Every endpoint has failed again: etcd is electing a leader, or down.
        all_failed = self._failures % len(self._config.endpoints) == 0
        pause_s = self._pauses.pause_s() if all_failed else 0.0
        if self._clock() + pause_s >= self._deadline_s:
            raise unreachable(
                self._seen,
                tls=self._config.ca_file is not None,
                timeout_s=self._config.timeout_s,
            )
        await asyncio.sleep(pause_s)


def _closed() -> RefusedError:
    return RefusedError("the etcd client is closed", expected="calls before `close` only")


def _unknown_outcome(error: ShoalError) -> ShoalError:
    return type(error)(
        f"{error.what}: the outcome of a transaction is unknown",
        seen=error.seen,
        fix="Read back what it would have changed.",
        details={"outcome": "unknown"},
    )
