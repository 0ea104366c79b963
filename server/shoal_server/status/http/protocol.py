"""HTTP/1.1 connections that are closed if their client is silent, slow or does not read.

The scope of each request has the caller that the client's certificate names. `errors.BodyLimit`
limits the body of a request that is not answered yet.
"""

import asyncio
import json
from enum import Enum
from typing import Any

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal_proto.errors import DeadlineExceeded, ShoalError
from shoal_proto.tls.names import Caller, caller_among
from shoal_server.serving.admission.config import HttpLimits
from shoal_server.serving.admission.connections import ConnectionCounts

CALLER = "shoal_caller"


def caller_in(scope: Scope) -> Caller | None:
    """Caller named by a request's certificate, if any."""
    caller = scope.get("state", {}).get(CALLER)
    return caller if isinstance(caller, Caller) else None


class Awaited(Enum):
    """Data that a client must send in time."""

    HEAD = "the head of a request"
    LATE_BODY = "the rest of a body whose request was already answered"


class BoundedProtocol(H11Protocol):
    """A connection that closes itself beyond a limit, and reports the reason to `counts`."""

    def __init__(self, limits: HttpLimits, counts: ConnectionCounts, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._counts = counts
        self._awaited: Awaited | None = None
        self._late: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self.lost = asyncio.Event()
        """Set once the connection is closed."""

    # uvicorn narrows the type in the same way.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        names = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
        uris = [value.encode() for kind, value in names if kind == "URI"]
        self.app_state = {**self.app_state, CALLER: caller_among(uris)}
        self._watch_client()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_client()
        if self._awaited is None and self.cycle.response_complete:
            # The late body is complete. Its bytes cancelled the keep-alive timeout that began with
            # the answer.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._stall):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self.lost.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._watch_reading()

    def _watch_reading(self) -> None:
        num_unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(
            self._limits.http_stalled_s, self._abort_stalled, num_unread
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _watch_client(self) -> None:
        awaited = self._to_await()
        if awaited is self._awaited:
            return
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._awaited = awaited
        if awaited is not None:
            self._late = self.loop.call_later(self._limits.http_request_s, self._end_late)

    def _to_await(self) -> Awaited | None:
        """Data that must arrive in time; None while a request is being answered, or the connection
        is idle."""
        if self.cycle is None:
            return Awaited.HEAD
        if not self.cycle.response_complete:
            return None
        if self.conn.their_state is h11.SEND_BODY:
            return Awaited.LATE_BODY
        begun, _ = self.conn.trailing_data
        return Awaited.HEAD if begun else None

    def _end_late(self) -> None:
        if self.transport.is_closing():
            return
        self._counts.count_closed("late requests")
        if self._awaited is Awaited.HEAD:
            late = DeadlineExceeded(
                "no complete request head arrived",
                expected=f"one within {self._limits.http_request_s:g} s of the connection's start,"
                " or of a further request's first byte",
            )
            # After a late body, the client would take this for the next request's answer.
            self.transport.write(raw_answer(408, late))
        self.transport.close()

    def _abort_stalled(self, num_unread: int) -> None:
        if self.transport.get_write_buffer_size() < num_unread:
            self._watch_reading()  # the client reads, over a slow link
            return
        self._counts.count_closed("clients that do not read")
        self.transport.abort()


def raw_answer(status: int, error: ShoalError) -> bytes:
    """Return a complete HTTP answer with the error as JSON, for a connection without a request.
    `status`: 408 or 503."""
    body = json.dumps(
        {
            "kind": type(error).__name__,
            "what": error.what,
            "seen": error.seen,
            "expected": error.expected,
            "fix": error.fix,
        }
    ).encode()
    phrase = {408: "Request Timeout", 503: "Service Unavailable"}[status]
    head = (
        f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
