"""Metrics of a coordinator's own ports: open, refused and failed calls and connections."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from shoal_proto import descriptor_limit
from shoal_server.serving.admission.calls import CallCounts
from shoal_server.status.http.bounds import HttpBounds


@dataclass(frozen=True, kw_only=True)
class PortMetrics:
    """Metrics of the gRPC and HTTP ports since this process started."""

    bounds: HttpBounds
    calls: CallCounts

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "shoal_coordinator_descriptors_number",
            "File descriptors that this process may have.",
            value=descriptor_limit.limit(),
        )
        yield from self._calls()
        yield from self._http()

    def _calls(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "shoal_coordinator_open_calls_number",
            "gRPC calls in progress.",
            value=self.calls.num_open,
        )
        refused = CounterMetricFamily(
            "shoal_coordinator_refused_calls",
            "gRPC calls that were refused, by the name of the error.",
            labels=["kind"],
        )
        for kind, count in sorted(self.calls.refused.items()):
            refused.add_metric([kind], count)
        failed = CounterMetricFamily(
            "shoal_coordinator_failed_calls",
            "gRPC calls that failed on this coordinator because of a fault in it; each is logged.",
            labels=["method"],
        )
        for method, count in sorted(self.calls.failed.items()):
            failed.add_metric([method], count)
        yield from (refused, failed)

    def _http(self) -> Iterator[Metric]:
        connections, streams = self.bounds.connections, self.bounds.streams
        yield GaugeMetricFamily(
            "shoal_http_open_connections_number", "HTTP connections.", value=connections.num_open
        )
        yield GaugeMetricFamily(
            "shoal_http_live_pages_number", "Streams of server-sent events.", value=streams.num_open
        )
        yield CounterMetricFamily(
            "shoal_http_refused_live_pages", "Streams that were refused.", value=streams.num_refused
        )
        refused = CounterMetricFamily(
            "shoal_http_refused_connections",
            "HTTP connections that were refused or closed by the server, by the reason.",
            labels=["reason"],
        )
        for reason, count in sorted(connections.refused.items()):
            refused.add_metric([reason], count)
        yield refused
