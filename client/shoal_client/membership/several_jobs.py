"""A process whose script joins one job after another: folds of a cross-validation, say."""

from shoal_client.liveness.beat_board import Ending
from shoal_client.membership.member import Member
from shoal_proto.errors import JobFinished, ShoalError

_completed: set[tuple[str, str]] = set()
"""The jobs that this process has trained to their ends, and as which member."""


class OwnJobs:
    """What a member's job is to its process, which may have had others before."""

    def __init__(self, member: Member) -> None:
        self._place = (member.spec.job, member.member_id)
        self._is_anothers = member.launcher_job not in ("", member.spec.job)

    def completed(self) -> None:
        """The process has trained it to its end."""
        _completed.add(self._place)

    def ending(self, error: ShoalError, *, admitted: bool) -> Ending:
        """What the launcher is told of this error.

        Who finds its job finished has nothing left to do: the worker was not needed. But not where
        the job is one of several of its script, which fails here with others before it.
        """
        ending = Ending.of(error)
        several = self._is_anothers or self._place in _completed
        return Ending.REFUSED if ending is Ending.FINISHED and several and not admitted else ending

    def told(self, failure: ShoalError) -> ShoalError:
        """The error of a join, for who has to mend the script."""
        again = self._place in _completed
        if not isinstance(failure, JobFinished) or not (again or self._is_anothers):
            return failure
        finished = f"job {self._place[0]} is finished"
        if failure.what != finished:
            # Of a run that was started over, say: that is no matter of this process's other jobs.
            return failure
        by = "by an earlier session of this process" if again else "by others"
        fix = "Give each a name, as in shoal.join(f'fold-{k}')" if again else "Catch JobFinished"
        return JobFinished(
            f"{finished}, {by}",
            seen=failure.seen,
            expected="another job for each session of a script"
            if again
            else "a job that still has work to do, or a script that goes on with its next job",
            fix=f'{fix}: "Several jobs in one script" in docs/run.md. `shoal run --fresh` and'
            " `shoal rm` let a job begin anew.",
        )
