"""Streams from the coordinators, with a time limit for the first message."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import grpc

from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.tls_refusals import explained, note_answer
from shoal_proto.errors import ShoalError, Unavailable
from shoal_proto.status import from_rpc_error
from shoal_proto.tls.names import COORDINATOR_NAME

MAX_FACTOR = 8

Message_co = TypeVar("Message_co", covariant=True)
M = TypeVar("M")


class Stream(Protocol[Message_co]):
    """A gRPC stream of messages."""

    def __iter__(self) -> Iterator[Message_co]: ...

    def cancel(self) -> bool: ...


class HeldStream:
    """Streams from the coordinators, one after another. One thread reads them; any thread may end
    them.
    """

    def __init__(self, first_answer_s: float) -> None:
        """`first_answer_s`: first limit of FirstReplyTimeout."""
        self.address = ""
        self._first_reply = FirstReplyTimeout(first_answer_s)
        self._lock = threading.Lock()
        self._stream: Stream[object] | None = None
        self._is_closed = False

    def hold(
        self,
        coordinators: Coordinators,
        start: Callable[[grpc.Channel], Stream[M]],
        handle: Callable[[M], object],
    ) -> ShoalError | None:
        """Open a stream with `start`; pass its messages to `handle`, until the stream ends or
        `handle` raises a ShoalError. Returns the error, if any.
        """
        address = self.address = coordinators.current
        try:
            stream = coordinators.on_channel(start)
            with self._lock:
                self._stream = stream
                if self._is_closed:
                    # `close` found no stream to cancel.
                    stream.cancel()
            with self._first_reply.until_answered(stream):
                for message in stream:
                    self._first_reply.record_reply()
                    note_answer(address)
                    handle(message)
        except grpc.RpcError as rpc_error:
            found = from_rpc_error(rpc_error, address)
            return self._first_reply.error(address) or explained(found, address, COORDINATOR_NAME)
        except ShoalError as error:
            # Raised by `on_channel` if `coordinators` is closed, or by `handle`.
            self.cancel()
            return error
        return None

    def cancel(self) -> None:
        """End the present stream."""
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    def close(self) -> None:
        """End the present stream, and any that is opened later."""
        with self._lock:
            self._is_closed = True
        self.cancel()


class FirstReplyTimeout:
    """Cancels a stream whose first reply is late: a stopped coordinator still accepts connections.
    Until there is a reply, the limit doubles with each stream, up to MAX_FACTOR times."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._limit_s = first_s
        self._timer: threading.Timer | None = None
        self._waited_s = 0.0

    @contextmanager
    def until_answered(self, stream: Stream[object]) -> Iterator[None]:
        """Cancel the stream if its first reply takes longer than the limit."""
        limit_s, self._waited_s = self._limit_s, 0.0

        def give_up() -> None:
            self._waited_s = limit_s
            stream.cancel()

        self._timer = threading.Timer(limit_s, give_up)
        self._timer.daemon = True
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()

    def record_reply(self) -> None:
        """End the stream's time limit."""
        if self._timer is not None:
            self._timer.cancel()
        self._limit_s = self._first_s

    def error(self, address: str) -> Unavailable | None:
        """Error for the stream that just ended, if the time limit ended it; then the next limit is
        doubled."""
        if not self._waited_s:
            return None
        self._limit_s = min(2 * self._limit_s, MAX_FACTOR * self._first_s)
        return Unavailable(
            f"the coordinator at {address} does not answer",
            seen=f"nothing for {self._waited_s:g} s",
            expected="an admission, or the address of the leader",
        )
