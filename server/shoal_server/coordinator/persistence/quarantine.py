"""Jobs in quarantine: those that a coordinator cannot go on with. All others go on.

A job comes here when a record of it cannot be read, when etcd refuses to keep one, or when what
handles its events fails. What etcd holds of it stays as it is, until `shoal repair`.
"""

from collections.abc import Callable, Iterator, Mapping

import structlog

from shoal_proto.errors import JobQuarantined, ShoalError

log = structlog.get_logger(__name__)

SEEN_LENGTH = 500
LOOK = "`shoal repair {job}` shows what is wrong, and what can be done."


def unreadable(job: str, key: str, error: Exception) -> JobQuarantined:
    """Of a job with a record that cannot be read."""
    return JobQuarantined(
        f"job {job} is quarantined: what lies at {key} in etcd cannot be read",
        seen=str(error)[:SEEN_LENGTH],
        expected="what a coordinator of this version writes there",
        fix=LOOK.format(job=job),
        details={"job": job, "key": key},
    )


def failed(job: str, error: Exception) -> JobQuarantined:
    """Of a job of which a write was refused, or an event not handled."""
    return JobQuarantined(
        f"job {job} is quarantined: its coordinator could not continue with it",
        seen=(str(error) if isinstance(error, ShoalError) else repr(error))[:SEEN_LENGTH],
        expected="every change of a job to be kept in etcd",
        fix=f"`shoal repair {job} --apply` takes it up again as etcd has it.",
        details={"job": job},
    )


class Quarantine:
    """Which jobs are in it, why, and since when (on the clock of all jobs)."""

    def __init__(
        self, clock: Callable[[], float], on_event: Callable[[str, str, str], object]
    ) -> None:
        """`on_event` is told job, kind and reason."""
        self._clock = clock
        self._on_event = on_event
        self._jobs: dict[str, tuple[JobQuarantined, float]] = {}

    def put(self, job: str, error: Exception) -> JobQuarantined:
        """The job goes in; what is told of it from now on. The first reason stays."""
        if job not in self._jobs:
            why = error if isinstance(error, JobQuarantined) else failed(job, error)
            self._jobs[job] = why, self._clock()
            log.error("job_quarantined", job=job, key=why.details.get("key"), reason=str(why))
            self._on_event(job, "job_quarantined", str(why))
        return self._jobs[job][0]

    def release(self, job: str) -> None:
        """The job comes out, if it was in."""
        self._jobs.pop(job, None)

    def clear(self) -> None:
        """Another coordinator leads."""
        self._jobs.clear()

    def check(self, job: str) -> None:
        """Raise JobQuarantined for a job that is in it."""
        if found := self._jobs.get(job):
            why, _ = found
            # An error of its own for each caller: what is raised keeps where it was raised.
            raise JobQuarantined(
                why.what, seen=why.seen, expected=why.expected, fix=why.fix, details=why.details
            )

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._jobs))

    @property
    def jobs(self) -> Mapping[str, tuple[JobQuarantined, float]]:
        """Why, and since when."""
        return self._jobs
