"""Metrics of every serving process, and an endpoint for processes without a status page."""

import asyncio
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal_proto.errors import AddressInUse
from shoal_server.serving.durations import Durations
from shoal_server.serving.loop_lag import LoopLag

COLLECT_WITHIN_S = 5.0
REQUEST_WITHIN_S = 10.0
"""Time after which a connection without a request is closed."""


def build_info(part: str) -> Metric:
    """Metric with the releases of Shoal and Python that this process runs, and which `part` of
    Shoal it is."""
    info = InfoMetricFamily("shoal_build", "The release of this process.")
    python = platform.python_version()
    info.add_metric([], {"version": version("shoal"), "python": python, "part": part})
    return info


def histogram(name: str, text: str, durations: Durations) -> Metric:
    """Durations as a metric of that name."""
    family = HistogramMetricFamily(name, text, labels=durations.labels)
    for labels, buckets, sum_s in durations.series():
        family.add_metric(list(labels), buckets=buckets, sum_value=sum_s)
    return family


def loop_lag(part: str, lag: LoopLag) -> Metric:
    """Lag of the process's event loop."""
    gauge = GaugeMetricFamily(
        f"shoal_{part}_loop_lag_seconds",
        "How late this process's event loop ran its tasks in the last ten seconds: 99th"
        " percentile, and longest (100).",
        labels=["percentile"],
    )
    gauge.add_metric(["99"], lag.p99_s)
    gauge.add_metric(["100"], lag.max_s)
    return gauge


class MetricsEndpoint:
    """Serves `/metrics` from threads of its own, while its `async with` block runs. `collect` runs
    on the event loop. Entry raises AddressInUse."""

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        self._host = host
        self._port = port
        self._collect = collect
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """Port of the endpoint; known inside the block."""
        return int(self._server.server_port)

    async def __aenter__(self) -> "MetricsEndpoint":
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OnLoop(asyncio.get_running_loop(), self._collect))
        try:
            self._server, self._thread = start_http_server(self._port, self._host, registry)
        except OSError as error:
            raise AddressInUse(
                f"cannot serve metrics at {self._host}:{self._port}",
                seen=str(error),
                expected="an address of this machine, and a free port that this user may open",
                fix="Choose another one; port 0 takes any free one.",
            ) from error
        # Each connection occupies a thread.
        self._server.RequestHandlerClass.timeout = REQUEST_WITHIN_S
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shut down in a thread, because a scrape in progress waits for this loop.
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join)


class _OnLoop(Collector):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, collect: Callable[[], Iterable[Metric]]
    ) -> None:
        self._loop = loop
        self._ask = collect

    def collect(self) -> Iterator[Metric]:
        async def ask() -> list[Metric]:
            return list(self._ask())

        found = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        yield from found.result(COLLECT_WITHIN_S)
