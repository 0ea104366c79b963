"""Metrics of parameter servers and their shards. A silent server has no metrics: counts of 0 would
look like a restart."""

from collections.abc import Iterator, Mapping
from itertools import accumulate, zip_longest
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from shoal_server.status.views import ServerView, ShardsView, ShardView

SHARD_COUNTERS = {
    "version": ("shoal_shard_updates", "Updates."),
    "pushes.applied": ("shoal_shard_pushes", "Pushes applied."),
    "pushes.duplicates": ("shoal_shard_duplicate_pushes", "Pushes that were retries."),
    "pushes.refused": ("shoal_shard_refused_pushes", "Pushes that the shard itself refused."),
}
SHARD_GAUGES = {
    "num_bytes": ("shoal_shard_size_bytes", "Parameter bytes."),
    "replication.lag": (
        "shoal_shard_lag_updates",
        "Updates that the slowest copy has not received.",
    ),
    "replication.unreplicated_bytes": (
        "shoal_shard_unreplicated_bytes",
        "Pushes on their way to a copy.",
    ),
}
SERVER_GAUGES = {
    "memory_bytes": ("shoal_server_memory_bytes", "Values and optimizer state, with copies."),
    "held_bytes": ("shoal_server_held_bytes", "Memory held for all jobs, which is limited."),
    "memory_limit_bytes": ("shoal_server_memory_limit_bytes", "Memory that the server may hold."),
    "unfinished_bytes": ("shoal_server_unfinished_bytes", "Pushes received and not yet applied."),
    "num_copies": ("shoal_server_copied_shards", "Shards of which the server keeps a copy."),
}
LOOP_LAG = (
    "shoal_ps_loop_lag_seconds",
    "Delay of tasks on a parameter server's event loop in the last ten seconds.",
)
COMPARISONS = (
    "shoal_ps_compared_pieces",
    "Pieces of copies that were compared with their primary's, by the result.",
)
SERVER_COUNTERS = {
    "refused_by_epoch": (
        "shoal_server_refused_by_epoch_pushes",
        "Parts of pushes to parameters refused for an outdated shard map.",
    ),
    "partial_pushes": ("shoal_server_partial_pushes", "Pushes applied to some shards only."),
}


def collect(views: Mapping[str, ShardsView]) -> Iterator[Metric]:
    """Yield the metric families of the shards of each job."""
    shards = [(job, shard) for job, view in views.items() for shard in view.shards if shard.created]
    servers = [
        (job, server)
        for job, view in views.items()
        for server in view.servers
        if server.state == "serving"
    ]
    yield from _shards(shards)
    yield from _servers(servers)
    yield _loop_lag(servers)
    yield _comparisons(servers)
    skew = GaugeMetricFamily(
        "shoal_job_skew_ratio",
        "Parameter bytes of the fullest server, divided by the mean over the servers.",
        labels=["job"],
    )
    for job, view in views.items():
        skew.add_metric([job], view.skew)
    yield skew
    lost = GaugeMetricFamily(
        "shoal_job_lost_shards", "Shards that no server holds any more.", labels=["job"]
    )
    for job, view in views.items():
        lost.add_metric([job], len(view.lost))
    yield lost
    uncopied = GaugeMetricFamily(
        "shoal_job_uncopied_shards",
        "Shards without a copy in step: they are lost if their server is.",
        labels=["job"],
    )
    for job, view in views.items():
        alone = [each for each in view.shards if each.created and not _is_copied(each)]
        uncopied.add_metric([job], len(alone))
    yield uncopied
    yield _staleness(views)


def _is_copied(shard: ShardView) -> bool:
    return any(not copy.joining for copy in shard.replication.copies)


def _shards(shards: list[tuple[str, ShardView]]) -> Iterator[Metric]:
    labels = ["job", "server", "shard"]
    for field, (name, text) in SHARD_GAUGES.items():
        gauge, figure = GaugeMetricFamily(name, text, labels=labels), attrgetter(field)
        for job, shard in shards:
            gauge.add_metric([job, shard.server_id, str(shard.shard_id)], figure(shard))
        yield gauge
    for field, (name, text) in SHARD_COUNTERS.items():
        counter, figure = CounterMetricFamily(name, text, labels=labels), attrgetter(field)
        for job, shard in shards:
            counter.add_metric([job, shard.server_id, str(shard.shard_id)], figure(shard))
        yield counter


def _servers(servers: list[tuple[str, ServerView]]) -> Iterator[Metric]:
    labels = ["job", "server"]
    for field, (name, text) in SERVER_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for job, server in servers:
            gauge.add_metric([job, server.server_id], getattr(server, field))
        yield gauge
    for field, (name, text) in SERVER_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=labels)
        for job, server in servers:
            counter.add_metric([job, server.server_id], getattr(server, field))
        yield counter


def _loop_lag(servers: list[tuple[str, ServerView]]) -> Metric:
    gauge = GaugeMetricFamily(*LOOP_LAG, labels=["server", "percentile"])
    for server_id, server in {server.server_id: server for _, server in servers}.items():
        gauge.add_metric([server_id, "99"], server.loop_lag.p99_s)
        gauge.add_metric([server_id, "100"], server.loop_lag.max_s)
    return gauge


def _comparisons(servers: list[tuple[str, ServerView]]) -> Metric:
    counter = CounterMetricFamily(*COMPARISONS, labels=["server", "result"])
    for server_id, server in {server.server_id: server for _, server in servers}.items():
        counter.add_metric([server_id, "same"], server.compared.same)
        counter.add_metric([server_id, "different"], server.compared.different)
    return counter


def _staleness(views: Mapping[str, ShardsView]) -> Metric:
    histogram = HistogramMetricFamily(
        "shoal_job_push_staleness_updates",
        "Updates between the pull of a gradient's values and its push, for each shard.",
        labels=["job"],
    )
    for job, view in views.items():
        if any(server.state != "serving" for server in view.servers):
            continue
        counts = [shard.pushes.staleness_counts for shard in view.shards]
        if not any(counts):
            continue
        totals = [sum(each) for each in zip_longest(*counts, fillvalue=0)]
        bounds = [*map(str, range(len(totals) - 1)), "+Inf"]
        buckets = list(zip(bounds, accumulate(map(float, totals)), strict=True))
        # Larger values count as the last bound, so the sum is a lower bound.
        late = sum(i * count for i, count in enumerate(totals))
        histogram.add_metric([job], buckets=buckets, sum_value=float(late))
    return histogram
