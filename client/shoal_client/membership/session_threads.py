"""The threads of a membership, and the stream of notices that one of them holds."""

import threading
import time
from collections.abc import Callable

import grpc
import structlog

from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.first_reply import FirstReplyTimeout
from shoal_client.connection.tls_refusals import explained, note_answer
from shoal_proto.errors import InternalError, ShoalError
from shoal_proto.status import from_rpc_error
from shoal_proto.tls.names import COORDINATOR_NAME
from shoal_proto.traces import tracing
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

log = structlog.get_logger(__name__)

FIRST_ANSWER_S = 1.0
"""Time to wait for a coordinator's first notice before another is asked; doubled each time, up to 8
times as long."""


class HeldStream:
    """A member's streams of notices, one after another. One thread holds them; any thread may
    cancel them."""

    def __init__(self, closing: threading.Event, joining: tracing.OngoingSpan) -> None:
        """`closing`: set before the last `cancel`; a stream opened after that is cancelled.
        `joining`: the span of joining, the parent of the spans of attending until it ends."""
        self.address = ""
        """Address of the current or last coordinator."""
        self._closing = closing
        self._joining = joining
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._first_reply = FirstReplyTimeout(FIRST_ANSWER_S)

    def hold(
        self,
        coordinators: Coordinators,
        request: pb.AttendRequest,
        handle: Callable[[pb.Notice], None],
    ) -> ShoalError | None:
        """Hold the stream until it ends or `handle` raises a ShoalError. Returns the error that
        ended it; None without one."""
        address = self.address = coordinators.current
        try:
            with self._joining.within(), tracing.span("Attend"):
                tracing.mark(request.token)
                stream = coordinators.on_channel(
                    lambda channel: MembershipStub(channel).Attend(request)
                )
            with self._lock:
                self._call = stream
                if self._closing.is_set():
                    # The session was closed meanwhile, and found no stream to cancel.
                    stream.cancel()
            with self._first_reply.until_answered(stream):
                for notice in stream:
                    self._first_reply.record_reply()
                    note_answer(address)
                    handle(notice)
        except grpc.RpcError as rpc_error:
            found = from_rpc_error(rpc_error, address)
            return self._first_reply.error(address) or explained(found, address, COORDINATOR_NAME)
        except ShoalError as answer_error:
            # The call that answered a notice failed, or came too late.
            self.cancel()
            return answer_error
        return None

    def cancel(self) -> None:
        with self._lock:
            if self._call is not None:
                self._call.cancel()


class SessionThreads:
    """Threads of a session. Each ends when `closing` is set, or with an error of its own or of a
    script's callback."""

    def __init__(self, on_failure: Callable[[ShoalError], None]) -> None:
        """`on_failure`: called with the error of a thread that fails, on that thread."""
        self._on_failure = on_failure
        self.closing = threading.Event()
        self.running: list[threading.Thread] = []

    def start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(name, target), name=name, daemon=True)
        self.running.append(thread)
        thread.start()

    def join(self, within_s: float | None = None) -> None:
        """Wait for the threads to end, for at most `within_s`."""
        give_up_s = None if within_s is None else time.monotonic() + within_s
        for thread in self.running:
            if thread is not threading.current_thread():
                thread.join(None if give_up_s is None else max(0.0, give_up_s - time.monotonic()))

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except ShoalError as error:
            self._on_failure(error)
        except Exception as error:
            failure = InternalError(
                f"a thread of the membership failed: {name}",
                seen=repr(error),
                fix="The log has the traceback. If storage or network failed, start the worker"
                " again; otherwise please report it.",
            )
            failure.__cause__ = error
            # Before the log: a traceback with its variables can take a second to write.
            self._on_failure(failure)
            log.exception("thread_failed", thread=name)
