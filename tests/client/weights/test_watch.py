"""The view of a series that a reader watches."""

import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import grpc
import pytest
import structlog.testing

from shoal_client.connection.coordinators import Coordinators
from shoal_client.weights.reader import SeriesReader
from shoal_client.weights.watch import SeriesWatch
from shoal_proto.errors import DeadlineExceeded, ShoalError, Unavailable
from shoal_proto.v1 import weights_pb2 as pb
from shoal_proto.v1.weights_pb2_grpc import (
    WeightSeriesServicer,
    add_WeightSeriesServicer_to_server,
)

LIMIT_S = 20.0


class OneView(WeightSeriesServicer):
    """A coordinator that sends one view, and keeps the stream open."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def Watch(
        self, request: pb.WatchSeriesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SeriesView]:
        context.add_callback(self.ended.set)
        yield pb.SeriesView(series=request.series, head=3)
        self.ended.wait(LIMIT_S)


@contextmanager
def served(service: WeightSeriesServicer, *, num_threads: int = 2) -> Iterator[Coordinators]:
    server = grpc.server(ThreadPoolExecutor(num_threads))
    add_WeightSeriesServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with closing(Coordinators([f"127.0.0.1:{port}"])) as coordinators:
            yield coordinators
    finally:
        server.stop(None)


def test_a_reader_that_ends_logs_no_interruption() -> None:
    """Closing cancels the stream, which is not a failure of the coordinator."""
    service = OneView()
    with served(service) as coordinators, structlog.testing.capture_logs() as logs:
        watch = SeriesWatch(coordinators, "rl/policy")
        assert watch.newest(0, LIMIT_S).head == 3
        watch.close()
    assert service.ended.wait(LIMIT_S)
    assert logs == []


@pytest.mark.parametrize("timeout_s", [None, math.inf, 1e300])
def test_a_wait_without_an_end_ends_with_the_watch(timeout_s: float | None) -> None:
    with served(OneView()) as coordinators, ThreadPoolExecutor(1) as pool:
        watch = SeriesWatch(coordinators, "rl/policy")
        waiting = pool.submit(watch.newest, 3, timeout_s)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        watch.close()
        assert isinstance(waiting.exception(LIMIT_S), Unavailable)


class LateView(WeightSeriesServicer):
    """A coordinator whose series has a version that its stream sends only once `goes_on` is set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def Watch(
        self, request: pb.WatchSeriesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SeriesView]:
        yield pb.SeriesView(series=request.series, head=1)
        self.goes_on.wait(LIMIT_S)
        yield pb.SeriesView(series=request.series, head=2)

    def Report(
        self, request: pb.ReaderReport, context: grpc.ServicerContext
    ) -> pb.ReaderReportReply:
        relays = ["" for _ in request.leased]
        return pb.ReaderReportReply(lease_s=30.0, leased=request.leased, relays=relays, head=2)


@pytest.mark.parametrize("leases", [True, False])
def test_a_reader_waits_for_the_version_that_a_report_has_named(leases: bool) -> None:
    """Its stream may have been interrupted when the version was committed."""
    service = LateView()
    with (
        served(service, num_threads=4) as coordinators,
        closing(SeriesReader([coordinators.current], "rl/policy", "reader")) as reader,
    ):
        assert reader.view().head == 1
        reader.catch_up(LIMIT_S)
        if leases:
            reader.lease(1)
        else:
            reader.report_now(LIMIT_S)
        with pytest.raises(DeadlineExceeded):
            reader.catch_up(0.05)
        service.goes_on.set()
        reader.catch_up(LIMIT_S)
        assert reader.view().head == 2


class RefusedAfterView(WeightSeriesServicer):
    def Watch(
        self, request: pb.WatchSeriesRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.SeriesView]:
        yield pb.SeriesView(series=request.series, head=3)
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "the certificate was revoked")


def test_a_watch_that_was_refused_shows_no_old_view() -> None:
    """It stays as it was for ever."""
    with (
        served(RefusedAfterView()) as coordinators,
        closing(SeriesWatch(coordinators, "rl/policy")) as watch,
    ):
        for newer_than in (3, 2, -1):
            with pytest.raises(ShoalError, match="revoked"):
                watch.newest(newer_than, LIMIT_S)


def test_an_outage_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader retries about once a second, for hours: each retry would be a line of its log."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            structlog.testing.capture_logs() as logs,
            closing(Coordinators([address])) as coordinators,
        ):
            failures: list[str] = []
            has_retried = threading.Event()

            def noted(failed: str, error: ShoalError) -> None:
                failures.append(str(error))
                if len(failures) == 5:
                    has_retried.set()

            monkeypatch.setattr(coordinators, "choose_next_replica", noted)
            watch = SeriesWatch(coordinators, "rl/policy")
            assert has_retried.wait(LIMIT_S)
            watch.close()
    lines = [each["reason"] for each in logs if each["event"] == "series_watch_interrupted"]
    assert len(lines) == len(set(failures)) < len(failures)
