"""A launcher's calls to the coordinators: a check that one answers, and reports of exits and
halts."""

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

import grpc
import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators, Method, chance
from shoal_client.connection.tls_refusals import explained
from shoal_proto.back_off import BackOff
from shoal_proto.errors import (
    CertificateRefused,
    NotLeader,
    RetryError,
    ShoalError,
    Unavailable,
    UnknownJob,
)
from shoal_proto.protocol import USER_AGENT_OPTION
from shoal_proto.status import from_detail, from_rpc_error
from shoal_proto.tls.channels import open_channel
from shoal_proto.tls.names import COORDINATOR_NAME
from shoal_proto.v1.membership_pb2 import (
    Ack,
    Cluster,
    GetClusterRequest,
    ReportExitRequest,
    ReportHaltRequest,
)
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S = 2.0
REPORT_LIMIT_S = 10.0
"""Time limit of a report: with the default limits, the member's lease has ended by then."""
MIN_ASKED_S = 0.1
SILENT_S = 5.0
"""A coordinator that has not answered after this time counts as unreachable."""
OTHERS_WITHIN_S = 0.5
"""Time for other coordinators once one has reported that none leads yet."""
OVER = frozenset({"lost", "stopped", "failed"})
"""Phases in which a job cannot be joined until an operator allows it."""
FINISHED = "finished"
MAX_REPORTS = 1000


def check_reachable(coordinators: Sequence[str], timeout_s: float) -> None:
    """Return as soon as a coordinator leads, or knows the leader. Raises Unavailable with the error
    of every address: at once if no process listens, after at most SILENT_S if none answers, after
    `timeout_s` if coordinators answer and none leads. Raises CertificateRefused if one side refuses
    the other's certificate.
    """
    give_up_s, back_off = time.monotonic() + timeout_s, BackOff()
    while True:
        left_s = max(give_up_s - time.monotonic(), MIN_ASKED_S)
        failures = _ask_all(coordinators, min(left_s, SILENT_S))
        if failures is None:
            return
        elected_soon = any(isinstance(each, NotLeader) for each in failures.values())
        if not elected_soon or time.monotonic() >= give_up_s:
            break
        time.sleep(back_off.pause_s(chance()))
    raise _unreachable(coordinators, failures)


def _unreachable(coordinators: Sequence[str], failures: Mapping[str, ShoalError]) -> ShoalError:
    for failure in failures.values():
        if isinstance(failure, CertificateRefused):
            return failure
    seen = "; ".join(f"{address}: {e.seen or e.what}" for address, e in failures.items())
    if any(isinstance(each, NotLeader) for each in failures.values()):
        return Unavailable(
            f"no coordinator leads at {', '.join(coordinators)}",
            seen=seen,
            expected="one of them to lead, which needs etcd",
            fix="`/readyz` of a coordinator's status page says why it does not lead.",
        )
    return Unavailable(
        f"no coordinator answers at {', '.join(coordinators)}",
        seen=seen,
        expected="a Shoal coordinator listening there",
        fix="Start one with `shoal up` or `shoal coordinator`, or name another --coordinator.",
    )


def _ask_all(addresses: Sequence[str], timeout_s: float) -> dict[str, ShoalError] | None:
    """Error of each coordinator; None as soon as one leads or knows the leader."""
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()
    calls: dict[str, grpc.Future[Cluster]] = {}
    failures: dict[str, ShoalError] = {}
    with ExitStack() as stack:
        for address in dict.fromkeys(addresses):
            options = (USER_AGENT_OPTION,)
            channel = stack.enter_context(open_channel(address, COORDINATOR_NAME, options))
            # Not a call about a job: the coordinator would log that there is no such job.
            calls[address] = MembershipStub(channel).GetCluster.future(
                GetClusterRequest(), timeout=timeout_s, wait_for_ready=False
            )
            calls[address].add_done_callback(partial(_put_address, answers, address))
        give_up_s = time.monotonic() + timeout_s
        while left := [each for each in calls if each not in failures]:
            try:
                address = answers.get(timeout=max(give_up_s - time.monotonic(), 0.0))
            except queue.Empty:
                silence = Unavailable("it does not answer", seen="no answer")
                return failures | dict.fromkeys(left, silence)
            failure = _failure_of(calls[address], address)
            if failure is None:
                return None
            failures[address] = failure
            if isinstance(failure, NotLeader):
                # Silent coordinators are asked again with the others.
                give_up_s = min(give_up_s, time.monotonic() + OTHERS_WITHIN_S)
    return failures


def _put_address(answers: "queue.SimpleQueue[str]", address: str, call: object) -> None:
    answers.put(address)


def _failure_of(call: "grpc.Future[Cluster]", address: str) -> ShoalError | None:
    try:
        call.result()
    except grpc.RpcError as error:
        failure = explained(from_rpc_error(error, address), address, COORDINATOR_NAME)
        is_transient = isinstance(failure, RetryError) and not failure.details.get("leader")
        if is_transient or isinstance(failure, CertificateRefused):
            return failure
    return None


Report = ReportExitRequest | ReportHaltRequest


class HostReporter:
    """Reports exits and halts (SIGSTOP) of this host's workers, in order, on its own thread. A
    report that is not accepted within REPORT_LIMIT_S is logged and dropped.
    """

    def __init__(self, coordinators: Sequence[str]) -> None:
        self._coordinators = Coordinators(coordinators)
        self._reports: queue.Queue[Report | threading.Event | None] = queue.Queue()
        self._closing = threading.Event()
        self.lost: ShoalError | None = None
        """StateLost, once an answer has reported it."""
        self._phase = ""
        """Empty before the first answer."""
        self._thread = threading.Thread(target=self._send_all, name="shoal-reports", daemon=True)

    def __enter__(self) -> "HostReporter":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._reports.put(None)
        self._thread.join(2 * CALL_TIMEOUT_S)
        self._coordinators.close()

    @property
    def final_phase(self) -> str:
        """The newest phase, if the job cannot be joined any more; else empty."""
        return self._phase if self._phase in OVER else ""

    @property
    def is_unfinished(self) -> bool:
        """True if the job's work was not done in the newest answer: it goes on, or it was lost,
        stopped or failed."""
        return self._phase not in ("", FINISHED)

    @property
    def finished(self) -> bool:
        """True if the job's work was done in the newest answer."""
        return self._phase == FINISHED

    def note_phase(self, phase: str) -> None:
        """Set the job's phase, learned in another way. Safe from any thread."""
        self._phase = phase

    def report(self, request: Report) -> None:
        """Send a report after earlier ones; drop it if MAX_REPORTS wait. Safe from any thread."""
        if self._reports.qsize() < MAX_REPORTS:
            self._reports.put(request)
        else:
            log.warning("host_report_dropped", member=request.member_id, reason="too many wait")

    def flush(self, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Wait until all reports are sent or dropped; False after `timeout_s`."""
        sent = threading.Event()
        self._reports.put(sent)
        return sent.wait(timeout_s)

    def _send_all(self) -> None:
        while (request := self._reports.get()) is not None:
            if isinstance(request, threading.Event):
                request.set()
            else:
                self._send(request)

    def _send(self, request: Report) -> None:
        give_up_s = time.monotonic() + REPORT_LIMIT_S
        log_fields = {"report": type(request).__name__, "member": request.member_id}

        def method(channel: grpc.Channel) -> Method[Ack]:
            stub = MembershipStub(channel)
            return stub.ReportExit if isinstance(request, ReportExitRequest) else stub.ReportHalt

        def attempt() -> Ack:
            return self._coordinators.call(
                method,
                request,
                timeout_s=max(give_up_s - time.monotonic(), MIN_ASKED_S),
                attempt_s=CALL_TIMEOUT_S,
                gives_up=self._closing.is_set,
            )

        try:
            ack = self._coordinators.persist(
                attempt,
                waits_for=f"{log_fields['report']} of {request.member_id}",
                gives_up=lambda: self._closing.is_set() or time.monotonic() >= give_up_s,
            )
        except UnknownJob:
            return  # the worker had not joined yet, so no member waits for it
        except OUTLASTED as error:
            log.warning("host_report_dropped", **log_fields, reason=str(error))
        except ShoalError as error:
            log.info("host_report_refused", **log_fields, reason=error.what)
        else:
            self.lost = from_detail(ack.lost) if ack.HasField("lost") else self.lost
            self._phase = ack.phase
