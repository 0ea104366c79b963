"""Connections to the coordinators: choice of the one to call, and retries."""

import math
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from shoal_client.connection.admission import ADMISSION_S
from shoal_client.connection.certificate_wait import CertificateWait, wait_s
from shoal_client.connection.tls_refusals import explained, note_answer
from shoal_proto import MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES
from shoal_proto.addresses import split_address
from shoal_proto.back_off import BackOff
from shoal_proto.errors import (
    CertificateRefused,
    DeadlineExceeded,
    JobQuarantined,
    NotLeader,
    RetryError,
    ShoalError,
    Unavailable,
)
from shoal_proto.protocol import USER_AGENT_OPTION
from shoal_proto.status import from_rpc_error
from shoal_proto.tls.channels import material, open_channel
from shoal_proto.tls.files import TlsMaterial
from shoal_proto.tls.names import COORDINATOR_NAME
from shoal_proto.traces import tracing

log = structlog.get_logger(__name__)

CLOSE_WITHIN_S = 1.0

OUTLASTED = (RetryError, JobQuarantined, CertificateRefused)
"""Errors that do not end the membership of a member that trains."""

# Not `random.random`: the script may have seeded it alike in every member, and draws by background
# threads would change the script's numbers.
chance = random.SystemRandom().random
"""Random number from 0 to 1."""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    # By default gRPC waits a minute for the answer to a ping. Members must leave a leader that
    # hangs before its successor declares them lost.
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted coordinator should be found at once; gRPC's own back-off grows to minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Two clients in one process do not share a connection: a test may cut one of them off.
    ("grpc.use_local_subchannel_pool", 1),
    USER_AGENT_OPTION,
)

Reply_co = TypeVar("Reply_co", covariant=True)
Started = TypeVar("Started")


class Method(Protocol[Reply_co]):
    """A unary method of a generated stub."""

    def __call__(self, request: Any, /, *, timeout: float | None = ...) -> Reply_co: ...


class Channels:
    """Channels to peers, by address and own certificate. Not thread-safe."""

    def __init__(self, name: str) -> None:
        """`name`: the name in the peers' certificates."""
        self._name = name
        self._open: dict[tuple[str, TlsMaterial | None], grpc.Channel] = {}

    def channel_to(self, address: str) -> grpc.Channel:
        """The channel to the address with the present certificate. The previous certificate's
        channel stays open, since it may still carry a call.
        """
        key = address, material()
        channel = self._open.get(key)
        if channel is None:
            outdated = [other for other in self._open if other[0] == address][:-1]
            close_channels([self._open.pop(other) for other in outdated])
            channel = self._open[key] = open_channel(address, self._name, CHANNEL_OPTIONS)
        return channel

    def pop_all(self, keep: Collection[str] = ()) -> list[grpc.Channel]:
        """Remove and return the channels to addresses that are not in `keep`; the caller must close
        them."""
        return [self._open.pop(key) for key in list(self._open) if key[0] not in keep]


class Coordinators:
    """The coordinators as one peer: calls go to the leader, and are retried elsewhere.

    Thread-safe. `call` takes at most its `timeout_s`, and up to 3 s more to find out why TLS failed
    (longer if a host name has to be resolved); `persist` has no limit."""

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError("no coordinator address was given; expected at least one host:port")
        self._addresses = list(addresses)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._channels = Channels(COORDINATOR_NAME)
        self._current = self._addresses[0]
        self._rotation = 0
        """Index of the address chosen last. `_current` is this address, or the leader that the
        coordinator there named."""

    @property
    def current(self) -> str:
        """host:port of the coordinator that is called next."""
        with self._lock:
            return self._current

    def channel(self) -> grpc.Channel:
        """Channel to the coordinator that is called next. Raises Unavailable after `close`."""
        with self._lock:
            if self._closed.is_set():
                raise closed()
            return self._channels.channel_to(self._current)

    def on_channel(self, start: Callable[[grpc.Channel], Started]) -> Started:
        """Return `start(self.channel())`. `start` must not block. The channel stays open meanwhile:
        a stub made on a closed channel crashes the process. Raises Unavailable after `close`."""
        with self._lock:
            return start(self.channel())

    def choose_next_replica(self, failed: str, error: ShoalError) -> None:
        """Choose the coordinator to call after a failure at `failed`: the leader that it named, or
        else the next address. A coordinator that was itself named cannot name another: two that are
        cut off might name each other for ever."""
        with self._lock:
            if self._current != failed:
                return
            leader = error.details.get("leader") if isinstance(error, NotLeader) else None
            if leader and leader != failed and failed == self._addresses[self._rotation]:
                self._current = leader
            else:
                self._rotation = (self._rotation + 1) % len(self._addresses)
                self._current = self._addresses[self._rotation]

    def call(
        self,
        method_of: Callable[[grpc.Channel], Method[Reply_co]],
        request: Any,
        *,
        timeout_s: float,
        attempt_s: float = math.inf,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Reply_co:
        """Call until it succeeds, is refused, or `timeout_s` has passed.

        An attempt that takes longer than `attempt_s` is repeated at another coordinator; give it
        only for a request that may be carried out twice. Raises a refusal by the server at once,
        and CertificateRefused once TLS has failed with every coordinator. Another RetryError or
        CertificateRefused is raised if no time is left for another attempt, if `gives_up()` returns
        True, or after `close`. So is DeadlineExceeded if the attempt had all of the time left: a
        server may answer with this error early.
        """
        if not (name := type(request).__name__.removesuffix("Request")).startswith("Heartbeat"):
            with tracing.span(name):
                if (token := getattr(request, "token", None)) is not None:
                    tracing.set_traceparent(token)
                return self._call(method_of, request, timeout_s, attempt_s, gives_up)
        return self._call(method_of, request, timeout_s, attempt_s, gives_up)

    def _call(
        self,
        method_of: Callable[[grpc.Channel], Method[Reply_co]],
        request: Any,
        timeout_s: float,
        attempt_s: float,
        gives_up: Callable[[], bool],
    ) -> Reply_co:
        give_up_s = time.monotonic() + timeout_s
        back_off, refused = BackOff(), set[str]()
        while True:
            address = self.current
            within_s = min(max(give_up_s - time.monotonic(), 0.001), attempt_s)
            try:
                reply = self.on_channel(method_of)(request, timeout=within_s)
                note_answer(address)
                return reply
            except grpc.RpcError as rpc_error:
                error = explained(from_rpc_error(rpc_error, address), address, COORDINATOR_NAME)
                is_over = isinstance(error, DeadlineExceeded) and within_s < attempt_s
                if isinstance(error, CertificateRefused):
                    refused.add(address)
                    is_over = refused.issuperset(self._addresses)
                else:
                    refused.discard(address)
                if not isinstance(error, RetryError | CertificateRefused) or is_over:
                    raise error from None
                pause_s = back_off.pause_s(chance())
                is_late = time.monotonic() + pause_s >= give_up_s
                if is_late or self._closed.is_set() or gives_up():
                    raise error from None
                self.choose_next_replica(address, error)
            except ValueError:
                # gRPC's error if `close` came between `on_channel` and the call.
                if not self._closed.is_set():
                    raise
                raise closed() from None
            self._closed.wait(pause_s)

    def persist(
        self,
        call: Callable[[], Reply_co],
        *,
        waits_for: str,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> Reply_co:
        """Repeat a call until it is answered, through outages of hours. `call` limits its own time.
        An error that is not in OUTLASTED is raised at once, CertificateRefused after
        SHOAL_CERTIFICATE_WAIT_S, and any error after `close` or once `gives_up()` is True."""
        back_off = BackOff()
        away_since_s: float | None = None
        certificate = CertificateWait(wait_s())
        while True:
            try:
                reply = call()
            except OUTLASTED as error:
                if isinstance(error, CertificateRefused):
                    if not certificate.record_refusal(time.monotonic()):
                        raise certificate.final_error(error) from None
                else:
                    certificate.record_acceptance()
                if gives_up() or self._closed.wait(back_off.pause_s(chance())):
                    raise
                if away_since_s is None:
                    # Count from now: a coordinator may have kept the call waiting before.
                    away_since_s = time.monotonic()
                    log.warning("coordinator_disconnected", waits_for=waits_for, reason=str(error))
                continue
            if away_since_s is not None:
                away_s = round(time.monotonic() - away_since_s, 1)
                log.info("coordinator_reconnected", waits_for=waits_for, away_s=away_s)
            return reply

    def close(self) -> None:
        """Close every connection; calls in progress fail."""
        self._closed.set()
        with self._lock:
            channels = self._channels.pop_all()
        close_channels(channels)


def closed() -> Unavailable:
    """Error of a call after `close`."""
    return Unavailable("the connection to the coordinator was closed")


class Closable(Protocol):
    """A gRPC channel, of which only `close` is used."""

    def close(self) -> None: ...


def close_channels(channels: Iterable[Closable]) -> None:
    """Close the channels within CLOSE_WITHIN_S: calls in progress fail. gRPC's `close` would wait
    for a call that KeyboardInterrupt kept from starting, and that never ends."""
    closing: list[threading.Thread] = []
    for channel in channels:
        thread = threading.Thread(target=channel.close, name="shoal-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No further thread is possible, for example once the script has ended.
            channel.close()
        else:
            closing.append(thread)
    give_up_s = time.monotonic() + CLOSE_WITHIN_S
    for thread in closing:
        thread.join(max(0.0, give_up_s - time.monotonic()))
    if stuck := sum(thread.is_alive() for thread in closing):
        log.info("channels_not_closed", num_channels=stuck)


def own_address(coordinators: Sequence[str], within_s: float = ADMISSION_S) -> str:
    """Address of this machine's interface towards the first coordinator to which there is a route;
    127.0.0.1 without coordinators. Sends nothing to them. Raises Unavailable if for `within_s` no
    name resolves, or no route exists."""
    if not coordinators:
        return "127.0.0.1"
    give_up_s, back_off = time.monotonic() + within_s, BackOff()
    is_logged = False
    while True:
        errors = []
        for each in coordinators:
            try:
                return _interface_towards(each)
            except OSError as error:
                errors.append(f"{each}: {error}")
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise Unavailable(
                "no route to a coordinator",
                seen="; ".join(errors),
                expected="a host name that resolves and a route to it",
            )
        if not is_logged:
            log.warning("coordinator_not_found", reason="; ".join(errors))
        is_logged = True
        time.sleep(min(left_s, back_off.pause_s(chance())))


def _interface_towards(address: str) -> str:
    found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
