"""How every gRPC service of Shoal answers: one interceptor, one way to bind, one way to stop.

No servicer sees a request that does not parse, or that `bounds` does not let through.
"""

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
from shoal_server.serving.message_bounds import MessageBounds

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

MAX_PENDING_CALLS = 20_000
MAX_AGENTS = 64
"""User agents of which it is remembered which protocol they speak."""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping as often as each second, so that a dead network is noticed in seconds.
    ("grpc.http2.min_ping_interval_without_data_ms", 900),
    ("grpc.keepalive_permit_without_calls", 1),
    # Calls that come at one moment wait their turn, as the heartbeats of a thousand hosts do after
    # a pause. gRPC begins to cancel them at random from 1,000 on.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
    # Two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    USER_AGENT_OPTION,
)


class Parser(Protocol):
    def __call__(self, data: bytes, /) -> Message: ...


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status, and bytes that do not parse into an answer.

    Requests are parsed here and not by gRPC, which would report a malformed one as an internal
    failure without a word on what was wrong.
    """

    def __init__(self) -> None:
        self._bounds = MessageBounds()
        # By method: what its handler became. As many as the server has methods.
        self._wrapped: dict[str, tuple[Any, grpc.RpcMethodHandler[Any, Any]]] = {}
        # By user agent: what is wrong with the protocol that it speaks.
        self._judged: dict[str, ProtocolMismatch | None] = {}

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
        """Why this caller and this server do not understand each other, if they do not."""
        metadata = call.invocation_metadata or ()
        agent = next((str(value) for key, value in metadata if key == "user-agent"), "")
        if agent not in self._judged:
            if len(self._judged) >= MAX_AGENTS:
                self._judged.clear()
            self._judged[agent] = _mismatch(agent)
        return self._judged[agent]

    def _wrap(
        self, method: str, handler: Any, mismatch: ProtocolMismatch | None = None
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        parse: Parser = handler.request_deserializer
        # grpcio's handlers are named tuples, though its types do not say so.
        replace: Callable[..., grpc.RpcMethodHandler[Any, Any]] = handler._replace
        # One request is parsed before the handler is called, a stream of them as it comes.
        decode: Callable[[Any], Any]
        if mismatch is not None:
            decode = partial(_refuse, mismatch)
        elif handler.unary_unary or handler.unary_stream:
            decode = partial(_parse, parse, self._bounds, method)
        else:
            decode = partial(_parsed, parse, self._bounds, method)
        kind = next(k for k in _KINDS if getattr(handler, k))
        answering = _many if kind.endswith("_stream") else _once
        call = answering(method, decode, getattr(handler, kind))
        encode = partial(_encoded, handler.response_serializer)
        return replace(request_deserializer=None, response_serializer=encode, **{kind: call})


_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def _mismatch(agent: str) -> ProtocolMismatch | None:
    spoken = announced(agent)
    if spoken is None:
        return None
    try:
        OWN_PROTOCOLS.agreed_with(spoken)
    except ProtocolMismatch as mismatch:
        return mismatch
    return None


def _refuse(mismatch: ProtocolMismatch, data: object) -> Message:
    # The one that is kept would gather the traceback of each call.
    raise ProtocolMismatch(
        mismatch.what, seen=mismatch.seen, expected=mismatch.expected, fix=mismatch.fix
    )


def _parse(parse: Parser, bounds: MessageBounds, method: str, data: bytes) -> Message:
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
    return message


def _encoded(serialize: Callable[[Message], bytes], reply: Message | bytes) -> bytes:
    """A handler may give a reply that many callers get as bytes, serialized once."""
    return reply if isinstance(reply, bytes) else serialize(reply)


async def _parsed(
    parse: Parser, bounds: MessageBounds, method: str, data: AsyncIterator[bytes]
) -> AsyncIterator[Message]:
    async for item in data:
        yield _parse(parse, bounds, method, item)


def refusal_of(method: str, error: Exception) -> ShoalError:
    """What a caller is told of what its call raised, which is logged. To be called where it is
    caught."""
    if isinstance(error, NotLeader):
        # Whoever has only this address asks again and again until somebody leads.
        log.debug("call_refused", method=method, kind=type(error).__name__, reason=str(error))
        return error
    if isinstance(error, ShoalError):
        log.info("call_refused", method=method, kind=type(error).__name__, reason=str(error))
        return error
    log.exception("call_failed", method=method)
    return InternalError(f"{method} failed on the server", seen=repr(error))


async def _abort(context: Context, method: str, error: Exception) -> None:
    code, text, metadata = to_status(refusal_of(method, error))
    await context.abort(code, text, metadata)


def _once(
    method: str, decode: Callable[[Any], Any], inner: Callable[..., Any]
) -> Callable[..., Any]:
    async def call(data: Any, context: Context) -> Any:
        try:
            return await inner(decode(data), context)
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - the outermost frame of a call
            await _abort(context, method, error)

    return call


def _many(
    method: str, decode: Callable[[Any], Any], inner: Callable[..., Any]
) -> Callable[..., Any]:
    async def call(data: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for reply in inner(decode(data), context):
                yield reply
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - the outermost frame of a call
            await _abort(context, method, error)

    return call


def new_server() -> grpc.aio.Server:
    """A server with Shoal's limits and error answers, not yet bound."""
    return grpc.aio.server(interceptors=(ErrorInterceptor(),), options=CHANNEL_OPTIONS)


def bind(server: grpc.aio.Server, address: str) -> int:
    """Bind to `host:port` (port 0: any free one) and return the port.

    Raises AddressInUse when the port is taken or the host is not this machine's.
    """
    try:
        port = server.add_insecure_port(address)
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
