"""The background reporter with a real status endpoint, and without one."""

import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from support.clusters import status_world
from support.clusters.status_world import World
from support.processes.load import unhurried

from shoal.membership import health as health_reports
from shoal.membership.health import HealthReporter
from shoal_client.certificates.folder import CertificateFolder
from shoal_proto.forks.openssl import NO_FORK
from shoal_proto.health import CourseFigures, HealthFigures
from shoal_proto.tls import files, identity
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import CertificateRole
from shoal_server.status.board import StatusBoard
from shoal_server.status.serve import StatusServer
from shoal_server.status.views import HealthView

INCARNATION = "incarnation-of-w1"
LONG_S = 3600.0
PATIENT_S = 60.0


class Board(StatusBoard):
    """A board with a condition on which a test's thread can wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[HealthView] = []
        self.changed = threading.Condition()

    def report(self, job: str, member_id: str, health: HealthView) -> None:
        with self.changed:
            self.reports.append(health)
            self.changed.notify_all()

    def wait_for(self, num_reports: int) -> list[HealthView]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.reports) >= num_reports, 10)
            return list(self.reports)


@contextmanager
def endpoint(board: Board, port: int = 0) -> Iterator[StatusServer]:
    """Serve the status endpoint of a coordinator with one job."""
    world = World(board=board)
    world.put(status_world.job())
    with status_world.endpoint(world, port) as server:
        yield server


def reporter(
    url: str | Callable[[], str], interval_s: float = LONG_S, incarnation: str = INCARNATION
) -> HealthReporter:
    return HealthReporter(url, "digits", "w1", incarnation, interval_s)


def report_events(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """The events of these log lines that are about reports."""
    events = [str(line["event"]) for line in lines]
    return [event for event in events if event.startswith("health_")]


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set long limits: an endpoint on a busy machine may answer late."""
    for name in health_reports.LIMITS:
        monkeypatch.setitem(health_reports.LIMITS, name, PATIENT_S)


@pytest.mark.usefixtures("patient")
def test_the_first_update_is_reported_at_once(board: Board) -> None:
    """The page shows a member from its first update on. Numbers of numpy are accepted too."""
    with endpoint(board) as server, reporter(server.url) as health:
        health.update(HealthFigures(step=int(np.int64(3)), loss=np.float32(0.5), device="cpu"))  # type: ignore[arg-type]
        (report,) = board.wait_for(1)
        health.close(PATIENT_S)
    assert (report.step, report.loss, report.device) == (3, 0.5, "cpu")


def test_updates_within_an_interval_are_one_report_that_close_sends(board: Board) -> None:
    """The updates within an interval make one report, with the last value of each field."""
    with endpoint(board) as server:
        with reporter(server.url) as health:
            health.update(HealthFigures(step=0, samples_per_s=10.0))
            board.wait_for(1)
            for step in range(1, 1001):
                health.update(HealthFigures(step=step, loss=1.0 / step))
        reports = board.wait_for(2)
    assert [report.step for report in reports] == [0, 1000]
    assert reports[1].samples_per_s == 10.0, "a field without an update keeps its value"


@pytest.mark.long
def test_reports_go_on_at_the_interval(board: Board) -> None:
    """Later updates are sent without a close."""
    with endpoint(board) as server, reporter(server.url, 0.05) as health:
        for step in range(3):
            health.update(HealthFigures(step=step))
            board.wait_for(step + 1)


@pytest.mark.sampled()
@pytest.mark.parametrize(("loss", "shown"), [(float("nan"), "nan"), (float("-inf"), "-inf")])
def test_a_non_finite_loss_is_reported(board: Board, loss: float, shown: str) -> None:
    """JSON has no NaN; users look for it all the same."""
    with endpoint(board) as server, reporter(server.url) as health:
        health.update(HealthFigures(step=1, loss=loss))
        (report,) = board.wait_for(1)
    assert str(report.loss) == shown


@pytest.mark.usefixtures("patient")
def test_a_job_without_an_end_is_reported(board: Board) -> None:
    """`epochs=sys.maxsize` makes more steps than a report can have; the coordinator would refuse
    all of it."""
    with endpoint(board) as server, reporter(server.url) as health:
        course = CourseFigures(num_steps=sys.maxsize * 18, writes_checkpoints=True)
        health.update(HealthFigures(step=3, course=course))
        (report,) = board.wait_for(1)
        health.close(PATIENT_S)
    assert (report.step, report.course) == (3, CourseFigures(writes_checkpoints=True))


def test_a_warning_that_names_a_file_with_bytes_that_are_not_utf8_is_reported(
    board: Board,
) -> None:
    with endpoint(board) as server, reporter(server.url) as health:
        health.update(HealthFigures(step=1, last_error=os.fsdecode(b"/data/caf\xe9")))
        (report,) = board.wait_for(1)
    assert report.last_error == r"/data/caf\udce9"


def test_training_is_not_held_up_by_a_silent_coordinator() -> None:
    """The peer accepts and never answers: updates return at once, and close is bounded."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        health = reporter(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.01)
        health.update(HealthFigures(step=0))
        connection, _ = silent.accept()
        started_s = time.monotonic()
        for step in range(1000):
            health.update(HealthFigures(step=step))
        updated_s = time.monotonic()
        health.close(timeout_s=0.2)
        closed_s = time.monotonic()
        connection.close()
    assert updated_s - started_s < unhurried(1.0)
    assert closed_s - updated_s < unhurried(1.0)


@pytest.mark.long
def test_an_outage_is_logged_once(board: Board) -> None:
    """Many failures make one line in the log, and recovery another. Reports resume by
    themselves."""
    with endpoint(board) as server:
        port, url = server.port, server.url
    num_reports = 0

    def noted_url() -> str:
        nonlocal num_reports
        num_reports += 1
        return url

    with structlog.testing.capture_logs() as lines, reporter(noted_url, 0.01) as health:
        deadline_s = time.monotonic() + 10
        step = 0
        while num_reports < 4:
            assert time.monotonic() < deadline_s
            step += 1
            health.update(HealthFigures(step=step))
        with endpoint(board, port):
            while not board.reports:
                assert time.monotonic() < deadline_s
                step += 1
                health.update(HealthFigures(step=step))
            health.close()
    assert report_events(lines) == ["health_report_failed", "health_reports_resumed"]


def test_a_refusal_is_logged_with_the_servers_reason(board: Board) -> None:
    """A replaced process learns of it from the log and is not disturbed otherwise."""
    with (
        structlog.testing.capture_logs() as lines,
        endpoint(board) as server,
        reporter(server.url, incarnation="old") as health,
    ):
        health.update(HealthFigures(step=1))
        health.close()
    assert not board.reports
    assert any("another process by now" in str(line.get("reason")) for line in lines)


def test_a_coordinator_that_does_not_lead_yet_is_no_warning(board: Board) -> None:
    """Members of a new cluster may report while its coordinator still reads the jobs."""
    world = World(board=board)
    world.put(status_world.job())
    world.ready = replace(status_world.READY, ready=False)
    with (
        structlog.testing.capture_logs() as lines,
        status_world.endpoint(world, 0) as server,
        reporter(server.url, 0.01) as health,
    ):
        deadline_s = time.monotonic() + 10
        while not report_events(lines):
            assert time.monotonic() < deadline_s
            health.update(HealthFigures(step=1))
            time.sleep(0.01)
        world.ready = status_world.READY
        health.update(HealthFigures(step=2))
        board.wait_for(1)
    assert {(line["event"], line["log_level"]) for line in lines if "report" in line["event"]} == {
        ("health_report_unread", "debug")
    }


@pytest.mark.usefixtures("patient")
def test_names_are_quoted_and_an_empty_url_waits(board: Board) -> None:
    """Odd names reach their own path, not another member's; without a URL nothing is sent."""
    url = ""
    with structlog.testing.capture_logs() as lines, endpoint(board) as server:
        with HealthReporter(lambda: url, "digits", "../w1?", INCARNATION, 0.01) as health:
            health.update(HealthFigures(step=1))
        assert report_events(lines) == []
        url = server.url
        with HealthReporter(lambda: url, "digits", "../w1?", INCARNATION, 0.01) as health:
            health.update(HealthFigures(step=1))
            health.close(PATIENT_S)
    # By then the reporter may be closed.
    assert report_events(lines) in (["health_report_failed"], ["health_report_too_late"])
    assert board.reports == []


def test_a_report_after_the_end_of_its_member_is_no_warning(board: Board) -> None:
    """A member that fails leaves before its reporter is closed."""
    with (
        structlog.testing.capture_logs() as lines,
        endpoint(board) as server,
        HealthReporter(server.url, "digits", "w9", INCARNATION, 0.01) as health,
    ):
        health.update(HealthFigures(step=1))
        deadline_s = time.monotonic() + 10
        while not report_events(lines):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    assert report_events(lines) == ["health_report_too_late"]


def test_no_thread_is_left_after_close() -> None:
    """Close ends the thread even if nothing was ever reported."""
    before = threading.active_count()
    reporter("http://127.0.0.1:1").close()
    assert threading.active_count() == before


def test_the_reporter_prevents_forks_while_it_uses_openssl(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a loading process that was forked while another thread held OpenSSL's locks hung.
    Here a thread reads a certificate again, and the reporter's makes a new connection."""
    folder = CertificateFolder(tmp_path)
    folder.init()
    used: list[tuple[str, bool]] = []

    def noted(kind: type, name: str) -> None:
        use = getattr(kind, name)

        def within(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name in ("shoal-health", "shoal-certificate"):
                used.append((name, NO_FORK._is_owned()))
            return use(*args, **kwargs)

        monkeypatch.setattr(kind, name, within)

    for name in ("do_handshake", "read", "send"):
        noted(ssl.SSLSocket, name)
    for name in ("load_cert_chain", "load_verify_locations", "wrap_socket"):
        noted(ssl.SSLContext, name)
    with (
        identity.using(in_folder(tmp_path, CertificateRole.COORDINATOR)),
        endpoint(board) as server,
        reporter(server.url, 0.01) as health,
    ):
        health.update(HealthFigures(step=1))
        board.wait_for(1)
        folder.renew()
        monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(files, "LOOK_WITHIN_S", 60.0)
        health.update(HealthFigures(step=2))
        board.wait_for(2)
    assert {name for name, _ in used} == {
        *("do_handshake", "read", "send"),
        *("load_cert_chain", "load_verify_locations", "wrap_socket"),
    }
    assert [name for name, is_held in used if not is_held] == []


def test_an_interval_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="interval_s is 0"):
        reporter("http://127.0.0.1:1", 0)
