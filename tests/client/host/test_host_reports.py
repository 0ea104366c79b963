"""Reports of a launcher about its workers: it sends them to a coordinator that accepts them."""

import queue
import socket
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from support.processes.load import unhurried

from shoal_client.host import reports
from shoal_client.host.reports import HostReporter
from shoal_proto.v1.membership_pb2 import Ack, ReportExitRequest
from shoal_proto.v1.membership_pb2_grpc import MembershipServicer, add_MembershipServicer_to_server

SILENT_S = 0.5
NUM_REPORTS = 8


class Coordinator(MembershipServicer):
    def __init__(self) -> None:
        self.phase = "running"
        self.reported_pids: queue.SimpleQueue[int] = queue.SimpleQueue()

    def ReportExit(self, request: ReportExitRequest, context: grpc.ServicerContext) -> Ack:
        self.reported_pids.put(request.pid)
        return Ack(phase=self.phase)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def address(coordinator: Coordinator) -> Iterator[str]:
    with futures.ThreadPoolExecutor(2) as answering:
        server = grpc.server(answering)
        add_MembershipServicer_to_server(coordinator, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(0).wait()


def test_a_coordinator_that_hangs_delays_only_the_first_report(
    coordinator: Coordinator, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's later reports do not wait for a timeout of their own."""
    monkeypatch.setattr(reports, "CALL_TIMEOUT_S", SILENT_S)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        silent = f"127.0.0.1:{hung.getsockname()[1]}"
        with HostReporter([silent, address]) as reporter:
            begun_s = time.monotonic()
            for pid in range(NUM_REPORTS):
                reporter.report(ReportExitRequest(job="j", pid=pid))
            assert reporter.flush(unhurried(60.0))
            took_s = time.monotonic() - begun_s
    assert [coordinator.reported_pids.get_nowait() for _ in range(NUM_REPORTS)] == list(
        range(NUM_REPORTS)
    )
    assert took_s < unhurried(3 * SILENT_S)


@pytest.mark.parametrize("phase", ["lost", "stopped", "failed"])
def test_the_answer_to_a_report_has_if_the_job_is_over(
    coordinator: Coordinator, address: str, phase: str
) -> None:
    """A retried job is no longer over in the next answer; a finished one does not count."""
    with HostReporter([address]) as reporter:
        for reported, known in ((phase, phase), ("running", ""), ("finished", "")):
            coordinator.phase = reported
            reporter.report(ReportExitRequest(job="j", pid=1))
            assert reporter.flush(unhurried(30.0))
            assert reporter.final_phase == known
