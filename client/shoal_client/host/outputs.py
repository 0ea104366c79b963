"""A launcher's answers to readers of its workers' output."""

import secrets
import threading
from collections.abc import Mapping
from types import TracebackType

import grpc
import structlog

from shoal_client.connection.coordinators import Coordinators, chance
from shoal_client.connection.held_stream import HeldStream, Stream
from shoal_client.host.output_tail import OutputTail
from shoal_proto.back_off import BackOff
from shoal_proto.errors import CertificateRefused, RetryError, ShoalError, Unavailable
from shoal_proto.v1 import outputs_pb2 as pb
from shoal_proto.v1.outputs_pb2_grpc import OutputsStub

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 2.0
FIRST_ANSWER_S = 2.0
REFUSED_PAUSE_S = 60.0
"""Wait after an error that a retry does not resolve."""
LAST_BYTES = 16 * 1024
"""Bytes of each worker's output that the coordinator keeps."""
MAX_LAST_BYTES = 2 << 20
"""Limit for all workers of a launcher: their lines have to fit into a message."""


class HostOutputs:
    """Answers readers for all workers of a launcher within its `with` block, and then sends the
    workers' last lines to the coordinator. Training goes on without a coordinator.
    """

    def __init__(
        self,
        coordinators: Coordinators,
        request: pb.ServeOutputRequest,
        tails: Mapping[str, OutputTail],
    ) -> None:
        """`tails`: the output of each member in `request`. `coordinators` must stay open within the
        block."""
        self._coordinators = coordinators
        self._request = request
        self._request.source = secrets.token_hex(8)
        self._tails = tails
        self._stream = HeldStream(FIRST_ANSWER_S)
        self._answered = threading.Event()
        """Set once the coordinator accepts last lines."""
        self._is_asking = True
        """True while a stream is open or being opened."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="shoal-outputs", daemon=True)

    def __enter__(self) -> "HostOutputs":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The coordinator may not have answered yet: workers can fail early.
        if self._is_asking and self._answered.wait(FIRST_ANSWER_S):
            self._leave_last_lines()
        self._closing.set()
        self._stream.close()
        self._thread.join(CALL_TIMEOUT_S)

    def _leave_last_lines(self) -> None:
        owners = self._request.members
        most = min(LAST_BYTES, MAX_LAST_BYTES // len(owners))
        last = [
            pb.LastOutput(owner=owner, part=self._tails[owner.member_id].part(most))
            for owner in owners
        ]
        request = pb.KeepOutputRequest(job=self._request.job, last=last)
        try:
            self._coordinators.call(
                lambda channel: OutputsStub(channel).Keep, request, timeout_s=CALL_TIMEOUT_S
            )
        except ShoalError as error:
            log.debug("last_lines_not_kept", reason=str(error))

    def _serve(self) -> None:
        back_off = BackOff()

        def start(channel: grpc.Channel) -> Stream[pb.OutputWanted]:
            return OutputsStub(channel).Serve(self._request)

        def handle(wanted: pb.OutputWanted) -> None:
            back_off.reset()
            self._answered.set()
            self._answer(wanted)

        while not self._closing.is_set():
            self._is_asking = True
            error = self._stream.hold(self._coordinators, start, handle)
            self._is_asking = False
            self._answered.clear()
            if self._closing.is_set():
                return
            error = error or Unavailable("the coordinator ended the stream of output requests")
            if isinstance(error, RetryError | CertificateRefused):
                self._coordinators.choose_next_replica(self._stream.address, error)
                self._closing.wait(back_off.pause_s(chance()))
            else:
                log.debug("outputs_not_served", reason=str(error))
                self._closing.wait(REFUSED_PAUSE_S)

    def _answer(self, wanted: pb.OutputWanted) -> None:
        tail = self._tails.get(wanted.member_id)
        if tail is None:
            return  # the first message asks for nothing
        part = tail.part(
            wanted.max_bytes,
            after=wanted.after if wanted.HasField("after") else None,
            before=wanted.before if wanted.HasField("before") else None,
        )
        request = pb.GiveOutputRequest(
            job=self._request.job, member_id=wanted.member_id, ticket=wanted.ticket, part=part
        )
        try:
            self._coordinators.call(
                lambda channel: OutputsStub(channel).Give, request, timeout_s=CALL_TIMEOUT_S
            )
        except ShoalError as error:
            log.debug("output_not_sent", member=wanted.member_id, reason=str(error))
