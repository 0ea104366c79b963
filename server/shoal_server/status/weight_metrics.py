"""Metrics of published weights: versions of each series, and how far each reader is behind."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from shoal_server.status.views import PublishedSeriesView, WeightReaderView

_OF_SERIES: Mapping[str, tuple[str, Callable[[PublishedSeriesView], float]]] = {
    "shoal_weights_version_number": (
        "Number of the newest version of the series.",
        lambda series: series.version,
    ),
    "shoal_weights_kept_versions": (
        "Versions of the series that are kept.",
        lambda series: len(series.versions),
    ),
    "shoal_weights_kept_bytes": (
        "Bytes of one copy of the versions that are kept.",
        lambda series: sum(version.num_bytes for version in series.versions),
    ),
    "shoal_weights_published_timestamp_seconds": (
        "Unix time at which the newest kept version was committed; 0 if none is kept.",
        lambda series: max((v.created_unix_s for v in series.versions), default=0.0),
    ),
    "shoal_weights_copies_number": (
        "Copies of the kept version that has the fewest copies.",
        lambda series: min((v.num_copies for v in series.versions), default=0),
    ),
    "shoal_weights_connected_readers": (
        "Readers of the series that have reported lately.",
        lambda series: series.num_readers,
    ),
    "shoal_weights_differing_readers": (
        "Readers whose installed bytes differ from the bytes that were published as their version.",
        lambda series: series.num_differing,
    ),
}
_OF_READER: Mapping[str, tuple[str, Callable[[WeightReaderView], float]]] = {
    "shoal_weights_reader_lag_versions": (
        "Versions by which the reader is behind the newest one.",
        lambda reader: reader.lag_versions,
    ),
    "shoal_weights_reader_fetch_seconds": (
        "Duration of the reader's last fetch.",
        lambda reader: reader.fetch_s,
    ),
    "shoal_weights_reader_fetch_bytes": (
        "Bytes that the reader's last fetch transferred.",
        lambda reader: reader.fetch_bytes,
    ),
}


def collect(every: Sequence[PublishedSeriesView]) -> Iterator[Metric]:
    """Yield the metric families of published weights."""
    for name, (text, measure) in _OF_SERIES.items():
        family = GaugeMetricFamily(name, text, labels=["series"])
        for series in every:
            family.add_metric([series.series], measure(series))
        yield family
    lost = CounterMetricFamily(
        "shoal_weights_lost_versions",
        "Versions of the series that were dropped because no server had a copy.",
        labels=["series"],
    )
    for series in every:
        lost.add_metric([series.series], series.num_lost)
    yield lost
    for name, (text, of_reader) in _OF_READER.items():
        family = GaugeMetricFamily(name, text, labels=["series", "reader"])
        for series in every:
            for reader in series.readers:
                family.add_metric([series.series, reader.reader_id], of_reader(reader))
        yield family
