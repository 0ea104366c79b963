"""The stream on which a coordinator tells a member what comes."""

import threading
from collections.abc import Callable

import grpc

from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.first_reply import FirstReplyTimeout
from shoal_client.connection.tls_refusals import explained, note_answer
from shoal_proto.errors import ShoalError
from shoal_proto.status import from_rpc_error
from shoal_proto.tls.names import COORDINATOR_NAME
from shoal_proto.traces import tracing
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

FIRST_ANSWER_S = 1.0
"""A coordinator that says nothing for so long is left for another, twice as late each time."""


class HeldStream:
    """A member's, one after another: held by one thread, cancelled by any."""

    def __init__(self, closing: threading.Event, joining: tracing.Ongoing) -> None:
        """`closing`: set before the last `cancel`; none is held from then on. `joining`: the span
        that attending is part of while it lasts."""
        self.address = ""
        """Of the coordinator that it goes to, or last went to."""
        self._closing = closing
        self._joining = joining
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._first_reply = FirstReplyTimeout(FIRST_ANSWER_S)

    def hold(
        self,
        coordinators: Coordinators,
        request: pb.AttendRequest,
        hear: Callable[[pb.Notice], None],
    ) -> ShoalError | None:
        """Until the stream ends, or `hear` raises a ShoalError; what it ended with."""
        address = self.address = coordinators.current
        try:
            with self._joining.within(), tracing.span("Attend"):
                tracing.mark(request.token)
                stream = MembershipStub(coordinators.channel()).Attend(request)
            with self._lock:
                self._call = stream
                if self._closing.is_set():
                    # The session was closed in between, and found no stream to cancel.
                    stream.cancel()
            with self._first_reply.until_answered(stream):
                for notice in stream:
                    self._first_reply.answered()
                    note_answer(address)
                    hear(notice)
        except grpc.RpcError as rpc_error:
            found = from_rpc_error(rpc_error, address)
            return self._first_reply.error(address) or explained(found, address, COORDINATOR_NAME)
        except ShoalError as answer_error:
            # An answer to a notice did not get through, or came too late to count.
            self.cancel()
            return answer_error
        return None

    def cancel(self) -> None:
        with self._lock:
            if self._call is not None:
                self._call.cancel()
