"""A job's history as stored in etcd: deflated JSON, validated when it is read.

Sizes and numbers are bounded, so that a bad record costs only its own job's charts.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from shoal_proto.deflated import inflate
from shoal_proto.health import MAX_LOGGED, RunOrigin
from shoal_server.etcd.json_fields import MAX_COUNT, UnreadableRecord, as_unreadable
from shoal_server.status.board import MAX_REASON_LENGTH
from shoal_server.status.history.change_reports import MAX_CHANGES
from shoal_server.status.history.records import ChangeView, LoggedView, SeriesView
from shoal_server.status.history.thinned import MAX_POINTS

MAX_BYTES = 1 << 20
MAX_INFLATED_BYTES = 16 * MAX_BYTES


@dataclass(frozen=True, kw_only=True)
class KeptHistory:
    """Stored history of one run. Fields may be added, never removed."""

    begun_unix_s: float
    """Start of this run."""
    series: SeriesView
    changes: tuple[ChangeView, ...] = ()
    extra_s: float = 0.0
    logged: tuple[LoggedView, ...] = ()
    run: RunOrigin | None = None
    gone_steps: int = 0
    """Sum of the steps of ended processes."""
    steps_by_process: Mapping[str, int] = field(default_factory=dict)
    """Steps of each process that has not ended, by public id."""
    last_removal: str = ""
    """Reason of the last removal of a member."""


_KEPT = TypeAdapter(KeptHistory)


def written(kept: KeptHistory) -> bytes:
    """Encode for etcd. The caller must check the size against MAX_BYTES."""
    return zlib.compress(_KEPT.dump_json(kept), 6)


def read(value: bytes) -> KeptHistory:
    """Decode a stored history. Raises UnreadableRecord."""
    with as_unreadable():
        kept = _KEPT.validate_json(inflate(value, MAX_INFLATED_BYTES))
    if problem := _problem(kept):
        raise UnreadableRecord(problem)
    return kept


def _problem(kept: KeptHistory) -> str:
    if len(kept.changes) > MAX_CHANGES or len(kept.logged) > MAX_LOGGED:
        return f"{len(kept.changes)} changes and {len(kept.logged)} names of logged values"
    if len(kept.last_removal) > MAX_REASON_LENGTH:
        return f"a reason of {len(kept.last_removal)} characters"
    numbers = [kept.begun_unix_s, kept.extra_s, *(each.unix_s for each in kept.changes)]
    counts = [each.generation for each in kept.changes]
    counts += [kept.gone_steps, *kept.steps_by_process.values()]
    if not all(_is_time(number) for number in numbers) or not all(map(_is_count, counts)):
        return "times, generations or steps out of range"
    problems = (_series_problem(kept.series), *map(_logged_problem, kept.logged))
    return next(filter(None, problems), "")


def _series_problem(series: SeriesView) -> str:
    columns: Sequence[Sequence[object]] = (
        *(series.generation, series.step, series.loss, series.samples_per_s, series.step_s),
        *(series.slowest_step_s, series.staleness, *series.step_s_by_rank),
    )
    lengths = {len(series.unix_s), *map(len, columns)}
    if len(lengths) > 1 or max(lengths) > MAX_POINTS:
        expected = f"equal lengths, at most {MAX_POINTS}"
        return f"columns of {sorted(lengths)} intervals; expected {expected}"
    if not all(map(_is_count, (*series.generation, *series.step))):
        return "steps or generations out of range"
    is_good = all(map(_is_time, (series.interval_s, *series.unix_s)))
    return "" if is_good else "times out of range"


def _logged_problem(logged: LoggedView) -> str:
    if len(logged.steps) != len(logged.values) or len(logged.steps) > MAX_POINTS:
        return f"{len(logged.steps)} steps and {len(logged.values)} values"
    counts = (logged.interval_steps, *logged.steps)
    is_good = all(map(_is_count, counts))
    return "" if is_good and -1 <= logged.newest_step <= MAX_COUNT else "steps out of range"


def _is_time(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= MAX_COUNT


def _is_count(value: int) -> bool:
    return 0 <= value <= MAX_COUNT
