"""Quarantine of jobs with which a coordinator cannot continue; all other jobs continue.

A job is quarantined if a record of it cannot be read or stored, or if handling an event fails. Its
records stay in etcd until `shoal repair` or `shoal rm`.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy

import structlog

from shoal_proto.errors import JobQuarantined, ShoalError

log = structlog.get_logger(__name__)

SEEN_LENGTH = 500
LOOK = "`shoal repair {job}` shows what is wrong, and what can be done."


def unreadable(job: str, key: str, error: Exception) -> JobQuarantined:
    """Error for a job with an unreadable record."""
    return JobQuarantined(
        f"job {job} is quarantined: the record at {key} in etcd cannot be read",
        seen=str(error)[:SEEN_LENGTH],
        expected="a record as a coordinator of this release writes it",
        fix=LOOK.format(job=job),
        details={"job": job, "key": key},
    )


def failed(job: str, error: Exception) -> JobQuarantined:
    """Error for a job if a write was refused, or an event could not be handled."""
    return JobQuarantined(
        f"job {job} is quarantined: its coordinator could not continue with it",
        seen=(str(error) if isinstance(error, ShoalError) else repr(error))[:SEEN_LENGTH],
        expected="every change of the job to be stored in etcd",
        fix=f"`shoal repair {job} --apply` loads it again from etcd.",
        details={"job": job},
    )


class Quarantine:
    """Quarantined jobs."""

    def __init__(
        self, clock: Callable[[], float], on_event: Callable[[str, str, str], object]
    ) -> None:
        """`on_event` is called with (job, kind, reason)."""
        self._clock = clock
        self._on_event = on_event
        self._jobs: dict[str, tuple[JobQuarantined, float]] = {}

    def quarantine(self, job: str, error: Exception) -> JobQuarantined:
        """Quarantine the job. Returns the first reason, as the error for callers."""
        if job not in self._jobs:
            why = error if isinstance(error, JobQuarantined) else failed(job, error)
            self._jobs[job] = why, self._clock()
            log.error("job_quarantined", job=job, key=why.details.get("key"), reason=str(why))
            self._on_event(job, "job_quarantined", str(why))
        return self._jobs[job][0]

    def release(self, job: str) -> None:
        """Release the job, if it is quarantined."""
        self._jobs.pop(job, None)

    def clear(self) -> None:
        """Release all jobs."""
        self._jobs.clear()

    def check(self, job: str) -> None:
        """Raise JobQuarantined if the job is quarantined."""
        if entry := self._jobs.get(job):
            # A copy, since a raised exception keeps its traceback.
            raise copy(entry[0])

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._jobs))

    @property
    def jobs(self) -> Mapping[str, tuple[JobQuarantined, float]]:
        """Quarantined jobs: the reason, and the start by the clock of all jobs."""
        return self._jobs
