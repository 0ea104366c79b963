"""A job's end by other hands than its members', and how it may be joined again."""

from shoal_server.core.generations.progress import Progress, Result
from shoal_server.core.job.drains import Drains
from shoal_server.core.job.job_state import End, JobState
from shoal_server.core.job.removal import Removal
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import DrainAsked, Refused, Save
from shoal_server.core.membership.phases import OVER, Phase, Trigger


class Lifetime:
    """Stops a job, gives it up, or lets it be joined again."""

    def __init__(self, state: JobState, removal: Removal, drains: Drains) -> None:
        self._state = state
        self._removal = removal
        self._drains = drains

    def stop(self, reason: str, now_s: float) -> None:
        """Have every member leave at its next step boundary; with the last of them the job is over.

        To be said again, by a new leader too. A job that is over stays as it is.
        """
        if self._state.stage.phase in OVER:
            return
        if self._state.end.stopping != reason:
            self._state.end.stopping = reason
            self._state.log("job_stopping", reason)
            self._state.do(Save())
        for member in list(self._state.members.values()):
            who = {"member_id": member.member_id, "incarnation": member.incarnation}
            self._drains.ask(member, DrainAsked(**who, reason=reason), now_s)
        if not self._state.members:
            self._removal.end(Trigger.STOPPED, reason, now_s)

    def abandon(self, reason: str, now_s: float) -> None:
        """The job has failed: all its members are gone, and none came back. Nothing for one that
        has members, or is over."""
        if self._state.members or self._state.stage.phase not in (Phase.COLLECT, Phase.ABORTED):
            return
        self._removal.end(Trigger.ABANDONED, reason, now_s)

    def keep_result(self, result: Result) -> None:
        """What came of a job that is over; nothing of one that was joined again meanwhile."""
        if self._state.stage.phase in OVER:
            self._state.tally.result = result
            self._state.do(Save())

    def retry(self, reason: str, now_s: float, *, from_scratch: bool) -> None:
        """Let the job be joined again. Raises Refused for one that has members, is finished, or of
        which nothing is left to go on with, unless from step 0.

        One that nobody is in can be joined already: whoever asks twice, since the first answer did
        not come or the first wish was another, is answered as at first.
        """
        phase = self._state.stage.phase
        if phase is Phase.FINISHED:
            raise Refused(refusals.finished(self._state.spec.job, self._state.stage.reason))
        if phase not in OVER and (self._state.members or self._state.end.completing):
            raise Refused(refusals.not_over(self._state.spec.job, self._state.stage.reason))
        tally = self._state.tally
        if tally.is_cleared and not from_scratch:
            raise Refused(refusals.cleared(self._state.spec.job))
        if from_scratch:
            self._state.progress = Progress(tally=tally)
        if phase in OVER:
            tally.result, tally.is_cleared = None, False
            self._state.end = End()
            self._state.to(Trigger.RETRIED, reason, now_s)
        self._state.do(Save())
