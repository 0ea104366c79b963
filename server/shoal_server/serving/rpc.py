"""Serving of all gRPC services: one interceptor for all calls, server options, and binding."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message

from shoal_proto import MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES
from shoal_proto.errors import (
    AddressInUse,
    InternalError,
    MalformedMessage,
    NotLeader,
    ProtocolMismatch,
    ShoalError,
)
from shoal_proto.protocol import OWN_PROTOCOLS, USER_AGENT_OPTION, announced
from shoal_proto.status import to_status
from shoal_proto.tls import identity
from shoal_proto.tls.channels import add_port
from shoal_proto.tls.names import Caller
from shoal_proto.traces import tracing
from shoal_server.serving.access.checks import Admit, admission, check_request
from shoal_server.serving.admission import audit
from shoal_server.serving.admission.calls import CallCounts
from shoal_server.serving.admission.config import CallLimits
from shoal_server.serving.durations import Durations
from shoal_server.serving.message_bounds import MessageBounds

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

MAX_PENDING_CALLS = 20_000
MAX_AGENTS = 64

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping each second to notice a dead network.
    ("grpc.http2.min_ping_interval_without_data_ms", 900),
    ("grpc.keepalive_permit_without_calls", 1),
    # By default gRPC cancels some calls at random once 1,000 wait.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
    # Two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    USER_AGENT_OPTION,
)
PEER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    # A connection to a dead server must not be used for its successor.
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of connections between parameter servers."""


class Parser(Protocol):
    def __call__(self, data: bytes, /) -> Message: ...


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps all handlers: limits calls, checks callers, parses and checks requests, and turns every
    error into a status.

    gRPC itself would report a malformed request as an internal failure.
    """

    def __init__(
        self,
        durations: Durations | None = None,
        counts: CallCounts | None = None,
        *,
        by_role: bool = False,
    ) -> None:
        """`durations` gets the duration of each call with one answer; `counts` limits calls in
        progress. `by_role`: callers have certificates, and may make their role's calls."""
        self._durations = durations or call_durations()
        self._by_role = by_role
        self._bounds = MessageBounds()
        self._counts = counts or CallCounts()
        # Handler of each method, and the handler that wraps it.
        self._wrapped: dict[str, tuple[Any, grpc.RpcMethodHandler[Any, Any]]] = {}
        # Mismatch of the protocol of each user agent, if any.
        self._mismatches: dict[str, ProtocolMismatch | None] = {}

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if (mismatch := self._mismatch(handler_call_details)) is not None:
            return self._wrap(method, handler, mismatch)
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(method, handler))
        return known[1]

    def _mismatch(self, call: grpc.HandlerCallDetails) -> ProtocolMismatch | None:
        metadata = call.invocation_metadata or ()
        agent = next((str(value) for key, value in metadata if key == "user-agent"), "")
        if agent not in self._mismatches:
            if len(self._mismatches) >= MAX_AGENTS:
                self._mismatches.clear()
            self._mismatches[agent] = _mismatch(agent)
        return self._mismatches[agent]

    def _wrap(
        self, method: str, handler: Any, mismatch: ProtocolMismatch | None = None
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        parse: Parser = handler.request_deserializer
        # grpcio's handlers are named tuples, though its types do not say so.
        replace: Callable[..., grpc.RpcMethodHandler[Any, Any]] = handler._replace
        decode: Decode
        if mismatch is not None:
            decode = partial(_refuse, mismatch)
        elif handler.unary_unary or handler.unary_stream:
            decode = partial(_parse, parse, self._bounds, method)
        else:
            decode = partial(_parse_each, parse, self._bounds, method)
        kind = next(k for k in _KINDS if getattr(handler, k))
        inner = getattr(handler, kind)
        admit = admission(method) if self._by_role else _anybody
        admitted = partial(_admitted, admit, decode)
        if kind.endswith("_stream"):
            call = _many(method, admitted, inner, self._counts)
        else:
            call = _once(method, admitted, inner, (self._durations, self._counts))
        encode = partial(_encoded, handler.response_serializer)
        return replace(request_deserializer=None, response_serializer=encode, **{kind: call})


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def _mismatch(agent: str) -> ProtocolMismatch | None:
    spoken = announced(agent)
    if spoken is None:
        return None
    try:
        OWN_PROTOCOLS.negotiate(spoken)
    except ProtocolMismatch as mismatch:
        return mismatch
    return None


Decode = Callable[[Caller | None, Any], Any]
"""Decodes a request, or a stream of requests, from (caller, bytes); the caller is None without
TLS."""


def _anybody(context: object) -> None:
    return None


def _admitted(admit: Admit, decode: Decode, context: Context, data: Any) -> Any:
    return decode(admit(context), data)


def _refuse(mismatch: ProtocolMismatch, caller: Caller | None, data: object) -> Message:
    # A new error: the cached one would gather the traceback of each call.
    raise ProtocolMismatch(
        mismatch.what, seen=mismatch.seen, expected=mismatch.expected, fix=mismatch.fix
    )


def _parse(
    parse: Parser, bounds: MessageBounds, method: str, caller: Caller | None, data: bytes
) -> Message:
    try:
        message = parse(data)
    except DecodeError as error:
        expected = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
        name = expected.full_name if expected is not None else "the method's request type"
        raise MalformedMessage(
            f"{method}: the request does not parse",
            seen=f"{len(data)} bytes ({error})",
            expected=name,
            fix="Send a message of that type; the .proto files are in the package shoal_proto.",
        ) from error
    bounds.check(message)
    if caller is not None and isinstance(message, Message):
        check_request(caller, message)
    return message


def _encoded(serialize: Callable[[Message], bytes], reply: Message | bytes) -> bytes:
    """A reply for many callers may be bytes already."""
    return reply if isinstance(reply, bytes) else serialize(reply)


async def _parse_each(
    parse: Parser,
    bounds: MessageBounds,
    method: str,
    caller: Caller | None,
    data: AsyncIterator[bytes],
) -> AsyncIterator[Message]:
    async for item in data:
        yield _parse(parse, bounds, method, caller, item)


def refusal_of(method: str, error: Exception) -> ShoalError:
    """Log the error of a call, and return the error for its caller: InternalError for any error but
    a ShoalError. Call this in the `except` block."""
    if isinstance(error, NotLeader):
        # The caller repeats the call until a coordinator leads.
        log.debug("call_refused", method=method, kind=type(error).__name__, reason=str(error))
        return error
    if isinstance(error, ShoalError):
        log.info("call_refused", method=method, kind=type(error).__name__, reason=str(error))
        return error
    log.exception("call_failed", method=method)
    return InternalError(f"{method} failed on the server", seen=repr(error))


async def _abort(context: Context, method: str, refusal: ShoalError, counts: CallCounts) -> None:
    counts.ended(method, refusal)
    code, text, metadata = to_status(refusal)
    await context.abort(code, text, metadata)


def call_durations() -> Durations:
    """Durations of calls by method ("Membership/Propose") and outcome: OK, "cancelled", "aborted",
    or the name of the error."""
    return Durations(("method", "outcome"))


def _once(
    method: str,
    decode: Callable[[Context, Any], Any],
    inner: Callable[..., Any],
    metrics: tuple[Durations, CallCounts],
) -> Callable[..., Any]:
    name = method.removeprefix("/").rpartition(".")[2]
    durations, counts = metrics

    async def call(data: Any, context: Context) -> Any:
        began_s, outcome = time.perf_counter(), "OK"
        request: object = None
        try:
            with counts.open(context.peer()):
                request = decode(context, data)
                token = getattr(request, "token", None)
                if token is None or not token.traceparent:
                    answer = await inner(request, context)
                else:
                    with tracing.span(name, token):
                        answer = await inner(request, context)
            audit.note(method, request, context, outcome)
            return answer
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            outcome = "aborted"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            audit.note(method, request, context, outcome)
            raise
        except Exception as error:  # noqa: BLE001 - the outermost frame of a call
            refusal = refusal_of(method, error)
            outcome = type(refusal).__name__
            audit.note(method, request, context, outcome)
            await _abort(context, method, refusal, counts)
        finally:
            durations.observe(time.perf_counter() - began_s, name, outcome)

    return call


def _many(
    method: str,
    decode: Callable[[Context, Any], Any],
    inner: Callable[..., Any],
    counts: CallCounts,
) -> Callable[..., Any]:
    async def call(data: Any, context: Context) -> AsyncIterator[Any]:
        try:
            with counts.open(context.peer()):
                async for reply in inner(decode(context, data), context):
                    yield reply
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - the outermost frame of a call
            await _abort(context, method, refusal_of(method, error), counts)

    return call


def new_server(
    durations: Durations | None = None,
    counts: CallCounts | None = None,
    limits: CallLimits | None = None,
) -> grpc.aio.Server:
    """A server with Shoal's limits and error answers, not yet bound. If this process has a
    certificate, callers need one too."""
    limits = limits or CallLimits()
    interceptor = ErrorInterceptor(
        durations, counts or CallCounts(limits), by_role=identity.own() is not None
    )
    return grpc.aio.server(
        interceptors=(interceptor,), options=(*CHANNEL_OPTIONS, *limits.channel_options)
    )


def bind(server: grpc.aio.Server, address: str) -> int:
    """Bind to `host:port` (port 0: any free one) and return the port. Raises AddressInUse."""
    try:
        port = add_port(server, address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise AddressInUse(
            f"cannot listen on {address}",
            seen="the address is taken, or is not an address of this machine",
            expected="a free port",
            fix="Stop what listens there, or choose another port; port 0 takes any free one.",
        )
    return port
