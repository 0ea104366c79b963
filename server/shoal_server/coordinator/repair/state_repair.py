"""Pure reconstruction of a job's state record from its readable parts."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from shoal_server.coordinator.persistence.stored_json import (
    MAX_MEMBERS,
    result_from,
    secret_digest_from,
    spec_from,
)
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import JobProgress, LifetimeFigures
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    JobSpec,
    Step,
    Verdict,
)
from shoal_server.etcd.json_fields import Fields, UnreadableRecord

T = TypeVar("T")


def repaired_state(
    job: str,
    data: bytes,
    *,
    generations: Iterable[int],
    records: Sequence[GenerationRecord],
    published_in: int = 0,
    bounds: JobSpec | None = None,
    secret_digest: str = "",
) -> StateRecord:
    """Reconstruct a job's record from its readable fields; others get their defaults. Fields of a
    later release are kept.

    The last generation and the progress may follow from the generations in etcd: their numbers
    (`generations`) and readable records (`records`). A missing `trained_in` becomes the newest
    generation that is not known to be aborted or asynchronous, so that the job never starts again
    from initial values. A missing `reached_step` becomes the step at which the newest committed
    synchronous generation in `records` was agreed. The series of the job, whose publications are
    refused from earlier generations, are of a generation up to `published_in`. `secret_digest` is
    that of the job's secret if the record's bounds, and with them the secret, cannot be read.

    Raises UnreadableRecord if neither the record nor `bounds` gives the bounds, or if the digest of
    the job's secret cannot be read.
    """
    try:
        fields = Fields.parsed(data)
    except UnreadableRecord:
        fields = Fields({})
    numbers = frozenset(generations)
    last = _count(fields, "last_generation")
    record = StateRecord(
        spec=replace(
            bounds or _spec(job, fields), secret_digest=secret_digest_from(fields, secret_digest)
        ),
        last_generation=Generation(max(numbers | {last or 0, published_in})),
        finished=_flag(fields, "finished"),
        reason="its own record could not be read, and was rewritten",
        progress=_progress(fields, numbers, records),
        lost=_readable(lambda: fields.text("lost") if fields.has("lost") else None, None),
        stopping=_readable(lambda: fields.text("stopping", ""), ""),
        failed=_flag(fields, "failed"),
        tally=_tally(fields),
        ended_s=_readable(lambda: fields.seconds("ended_unix_s"), 0.0),
        done=_readable(lambda: fields.texts("done"), ()),
        completing=_flag(fields, "completing"),
    )
    more = {name: value for name, value in fields.unread_fields().items() if name != "reason"}
    return replace(record, more=more)


def _spec(job: str, fields: Fields) -> JobSpec:
    spec = replace(spec_from(fields.object("spec")), job=job)
    if problem := spec.problem():
        raise UnreadableRecord(problem)
    return spec


def _progress(
    fields: Fields, numbers: Collection[int], records: Sequence[GenerationRecord]
) -> JobProgress:
    trained_in, reached = _count(fields, "trained_in"), _count(fields, "reached_step")
    if trained_in is None:
        idle = {r.roster.generation for r in records if not _may_have_trained(r)}
        trained_in = max((n for n in numbers if n not in idle), default=0)
    if reached is None:
        steps = {r.roster.generation: r.roster.step for r in records if _may_have_trained(r)}
        reached = steps[max(steps)] if trained_in and steps else 0
    return JobProgress(trained_in=Generation(trained_in), reached=Step(reached))


def _may_have_trained(record: GenerationRecord) -> bool:
    return record.verdict is Verdict.COMMITTED and record.roster.synchronous


def _tally(fields: Fields) -> LifetimeFigures:
    return LifetimeFigures(
        begun_s=_readable(lambda: fields.seconds("begun_unix_s"), 0.0),
        num_breaks=_count(fields, "num_breaks") or 0,
        idle_s=_readable(lambda: fields.seconds("idle_s"), 0.0),
        idle_since_s=_readable(lambda: fields.seconds("idle_since_unix_s"), 0.0) or None,
        result=_readable(lambda: result_from(fields.object("result")), None),
        is_cleared=_flag(fields, "cleared"),
    )


def _count(fields: Fields, name: str) -> int | None:
    return _readable(lambda: fields.count(name), None)


def _flag(fields: Fields, name: str) -> bool:
    return _readable(lambda: fields.flag(name), False)


def _readable(read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except UnreadableRecord:
        return otherwise


def bounds_of(job: str, least: int, most: int, desired: int) -> JobSpec | None:
    """Return the bounds given by an operator, None if none are. Raises UnreadableRecord for invalid
    ones."""
    if not least and not most and not desired:
        return None
    least = least or 1
    spec = JobSpec(
        job=job,
        min_members=least,
        max_members=most or MAX_MEMBERS,
        desired_members=desired or least,
    )
    if problem := spec.problem():
        raise UnreadableRecord(problem)
    return spec
