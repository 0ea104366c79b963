"""Metrics for Prometheus, computed from the source at each scrape, so that they cannot drift from
what the API shows."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal_proto.errors import ShoalError
from shoal_proto.health import gauges
from shoal_proto.terminal import printable
from shoal_server.serving.durations import Durations
from shoal_server.serving.loop_lag import LoopLag
from shoal_server.serving.process_metrics import build_info, histogram, loop_lag
from shoal_server.serving.rpc import call_durations
from shoal_server.serving.tasks import gather_bounded
from shoal_server.serving.unix_clock import unix_s
from shoal_server.status import shard_metrics, weight_metrics
from shoal_server.status.port_metrics import PortMetrics
from shoal_server.status.reading import StatusQueries
from shoal_server.status.views import FIGURES, OVER, STATES, JobDetail, ShardsView

log = structlog.get_logger(__name__)

QUARANTINED = "quarantined"
"""State of a job whose counters are not known: counts of 0 would look like a restart."""
PHASES = (
    *("collect", "prepare", "committed", "running", "aborted", "finished", "failed", "stopped"),
    *("lost", QUARANTINED),
)
KINDS = (
    *("generation_changed", "member_joined", "member_removed", "member_refused"),
    *("collective_failed", "phase_aborted", "server_lost", "shards_lost", "shards_moved"),
    *("snapshot_taken", "job_quarantined"),
)
"""Events that have counters from the start: Prometheus sees no increase in a counter that first
appears with the value 1."""
MAX_OVER = 50


@dataclass(frozen=True, kw_only=True)
class ProcessMeasures:
    """Measurements of the coordinator's own process."""

    loop_lag: LoopLag = dataclasses.field(default_factory=LoopLag)
    calls: Durations = dataclasses.field(default_factory=call_durations)
    num_leader_changes: Callable[[], int] = lambda: 0
    rendezvous: Callable[[], tuple[int, int]] = lambda: (0, 0)
    ports: PortMetrics | None = None


async def render(reading: StatusQueries, measures: ProcessMeasures) -> bytes:
    """All metrics in Prometheus' text format. Only the newest MAX_OVER of the ended jobs have
    series. Shards of ended jobs, and shards that cannot be read from etcd, are left out."""
    every = reading.source.jobs()
    over = [job for job in every if job.summary.state in OVER]
    over.sort(key=lambda job: -job.summary.since_unix_s)
    jobs = [job for job in every if job.summary.state not in OVER]
    names = [job.summary.job for job in jobs]
    views = await gather_bounded(partial(_shards, reading), names, 16)
    shards = {name: view for name, view in zip(names, views, strict=True) if view is not None}
    states = Counter(job.summary.state for job in every)
    jobs = [replace(job, summary=reading.summary(job)) for job in (*jobs, *over[:MAX_OVER])]
    collected = tuple(_Snapshot(reading, jobs, states, shards, measures).collect())
    # Thousands of members have text of megabytes: the loop must go on meanwhile.
    return await asyncio.to_thread(_text, collected)


def _text(collected: tuple[Metric, ...]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Printable(collected))
    return generate_latest(registry)


async def _shards(reading: StatusQueries, job: str) -> ShardsView | None:
    try:
        return await reading.source.shards(job)
    except ShoalError as error:
        log.warning("shards_not_read", job=job, reason=str(error))
        return None


@dataclass(frozen=True, eq=False)  # the registry keeps collectors by identity
class _Printable(Collector):
    """Metrics whose labels have no control characters, which a terminal would obey."""

    collected: tuple[Metric, ...]

    def collect(self) -> Iterator[Metric]:
        for metric in self.collected:
            metric.samples = [
                sample._replace(labels={k: printable(v) for k, v in sample.labels.items()})
                for sample in metric.samples
            ]
            yield metric


@dataclass(frozen=True)
class _Snapshot:
    reading: StatusQueries
    jobs: Sequence[JobDetail]
    """Summaries include what members reported."""
    states: Mapping[str, int]
    shards: Mapping[str, ShardsView]
    measures: ProcessMeasures

    def collect(self) -> Iterator[Metric]:
        ready = self.reading.source.readiness().ready
        yield GaugeMetricFamily(
            "shoal_coordinator_ready_bool",
            "1 while this coordinator leads and reaches etcd.",
            value=float(ready),
        )
        yield build_info("coordinator")
        yield loop_lag("coordinator", self.measures.loop_lag)
        yield CounterMetricFamily(
            "shoal_coordinator_leader_changes",
            "Changes of the leading coordinator that this one has seen.",
            value=self.measures.num_leader_changes(),
        )
        yield histogram(
            "shoal_coordinator_call_duration_seconds",
            "Duration of gRPC calls with one answer, by method and outcome (OK, cancelled, or the"
            " error).",
            self.measures.calls,
        )
        num_bytes, num_keys = self.measures.rendezvous()
        yield GaugeMetricFamily(
            "shoal_coordinator_rendezvous_bytes",
            "Bytes in the rendezvous stores of all generations in force, including keys.",
            value=num_bytes,
        )
        yield GaugeMetricFamily(
            "shoal_coordinator_rendezvous_keys_number",
            "Keys in the rendezvous stores of all generations in force.",
            value=num_keys,
        )
        if self.measures.ports is not None:
            yield from self.measures.ports.collect()
        jobs = GaugeMetricFamily("shoal_jobs", "Jobs by state.", labels=["state"])
        for state in STATES:
            jobs.add_metric([state], self.states.get(state, 0))
        yield jobs
        yield from self._jobs()
        yield from self._changes()
        yield from self._members()
        yield from self._logged()
        yield from self._samples()
        yield from shard_metrics.collect(self.shards)
        yield from weight_metrics.collect(self.reading.source.weights())

    def _jobs(self) -> Iterator[Metric]:
        phase = GaugeMetricFamily(
            "shoal_job_phase_bool", "1 for the job's phase.", labels=["job", "phase"]
        )
        generation = GaugeMetricFamily(
            "shoal_job_generation_number", "Newest generation of the job.", labels=["job"]
        )
        members = GaugeMetricFamily(
            "shoal_job_members", "Members of the job by state.", labels=["job", "state"]
        )
        step = GaugeMetricFamily(
            "shoal_job_progress_steps",
            "Highest step of a member, or the sum of their steps if members take none together.",
            labels=["job"],
        )
        events = CounterMetricFamily(
            "shoal_job_events", "Events since the coordinator started.", labels=["job", "kind"]
        )
        reports = CounterMetricFamily(
            "shoal_job_health_reports", "Health reports received.", labels=["job"]
        )
        for job in self.jobs:
            summary, name = job.summary, job.summary.job
            for each in PHASES:
                phase.add_metric([name, each], float(summary.phase == each))
            if summary.state != QUARANTINED:
                generation.add_metric([name], summary.generation)
                step.add_metric([name], summary.step)
            states = Counter({"training": 0})
            states.update(entry.member.state for entry in job.members)
            for state, number in sorted(states.items()):
                members.add_metric([name, state], number)
            counts = {**dict.fromkeys(KINDS, 0), **self.reading.board.event_counts(name)}
            for kind, count in sorted(counts.items()):
                events.add_metric([name, kind], count)
            reports.add_metric([name], self.reading.board.num_reports(name))
        yield from (phase, generation, members, step, events, reports)

    def _changes(self) -> Iterator[Metric]:
        labels, board = ["job"], self.reading.board
        restarts = CounterMetricFamily(
            "shoal_job_restarts",
            "Times that training went on after a member was lost or a collective failed.",
            labels=labels,
        )
        idle = CounterMetricFamily(
            "shoal_job_unproductive_seconds",
            "Time without training: no generation ran, or members paused for a change.",
            labels=labels,
        )
        goodput = GaugeMetricFamily(
            "shoal_job_goodput_ratio", "Share of the job's life spent training.", labels=labels
        )
        lost = CounterMetricFamily(
            "shoal_job_lost_members", "Members that were lost.", labels=labels
        )
        steps = CounterMetricFamily(
            "shoal_job_lost_steps", "Steps that were committed and taken again.", labels=labels
        )
        recovery = HistogramMetricFamily(
            "shoal_job_recovery_seconds",
            "Time from the last step before a change to the first one after it, minus the usual"
            " time of a step.",
            labels=labels,
        )
        age = GaugeMetricFamily(
            "shoal_job_snapshot_age_seconds",
            "Time since the newest snapshot of a job that has not ended.",
            labels=labels,
        )
        for summary in (job.summary for job in self.jobs):
            name, totals = summary.job, board.change_totals(summary.job)
            if summary.state != QUARANTINED:
                restarts.add_metric([name], summary.num_restarts)
                idle.add_metric([name], summary.unproductive_s)
            if summary.goodput is not None:
                goodput.add_metric([name], summary.goodput)
            lost.add_metric([name], totals.num_lost)
            steps.add_metric([name], totals.steps_lost)
            for _, buckets, sum_s in totals.recoveries.series():
                recovery.add_metric([name], buckets=buckets, sum_value=sum_s)
            taken_s = board.snapshot_unix_s(name)
            if taken_s is not None and summary.state not in OVER:
                age.add_metric([name], max(0.0, unix_s() - taken_s))
        yield from (restarts, idle, goodput, lost, steps, recovery, age)

    def _members(self) -> Iterator[Metric]:
        labels = ["job", "member"]
        age = GaugeMetricFamily(
            "shoal_member_last_seen_age_seconds", "Time since the last sign of life.", labels=labels
        )
        steps = GaugeMetricFamily(
            "shoal_member_progress_steps", "Optimizer steps of the member.", labels=labels
        )
        warned = GaugeMetricFamily(
            "shoal_member_warned_bool",
            "1 while the last report has an error, such as a loss that does not fall.",
            labels=["job", "member"],
        )
        figures = [
            (GaugeMetricFamily(name, FIGURES[field], labels=labels), field)
            for field, name in gauges().items()
        ]
        now_s = unix_s()
        for job in self.jobs:
            name = job.summary.job
            for member in (entry.member for entry in job.members):
                key = [name, member.member_id]
                age.add_metric(key, max(0.0, now_s - member.last_seen_unix_s))
                steps.add_metric(key, self.reading.step(name, member))
                report = self.reading.health(name, member)
                if report is not None:
                    warned.add_metric(key, float(bool(report.last_error)))
                for gauge, field in figures:
                    value = getattr(report, field, None)
                    if value is not None:
                        gauge.add_metric(key, float(value))
        yield from (age, steps, warned, *(gauge for gauge, _ in figures))

    def _logged(self) -> Iterator[Metric]:
        newest = GaugeMetricFamily(
            "shoal_job_logged_value", "Newest value logged by the script.", labels=["job", "name"]
        )
        for job in (each.summary.job for each in self.jobs):
            for name, (_, value) in self.reading.board.logged(job).newest_values().items():
                newest.add_metric([job, name], value)
        yield newest

    def _samples(self) -> Iterator[Metric]:
        names = ("completed", "returned", "ignored")
        counters = {
            name: CounterMetricFamily(f"shoal_job_{name}_samples", text, labels=["job"])
            for name, text in zip(
                names,
                (
                    "Samples completed over all epochs.",
                    "Samples that lost members returned.",
                    "Samples reported by members that did not hold them.",
                ),
                strict=True,
            )
        }
        in_flight = GaugeMetricFamily(
            "shoal_job_in_flight_samples", "Samples leased and not completed.", labels=["job"]
        )
        for job in self.jobs:
            if job.samples is None:
                continue
            in_flight.add_metric([job.summary.job], job.samples.in_flight)
            for name in names:
                counters[name].add_metric([job.summary.job], getattr(job.samples, name))
        yield from (in_flight, *counters.values())
