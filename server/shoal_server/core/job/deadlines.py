"""The limits of a job that run: since when, or until when."""

from dataclasses import dataclass


def passed(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + limit_s


@dataclass(kw_only=True)
class Deadlines:
    """None: that limit does not run."""

    deadline_s: float | None = None
    """When the phase is over at the latest."""
    bring_up_over_s: float | None = None
    """Whatever still moves then, the generation is not brought up."""
    first_proposal_s: float | None = None
    """Since when somebody is ready to train."""
    broken_since_s: float | None = None
    """Since when members have been asked to stop."""
    suspect_since_s: float | None = None
    """Since when word of a loss is awaited, after a collective failed."""
    overdue_check_s: float | None = None
    """No member has waited for the join limit before then."""

    def stop(self) -> None:
        """Nothing is waited for any more."""
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.bring_up_over_s = self.overdue_check_s = None

    def postpone(self, by_s: float) -> None:
        """For so long nobody could be told anything."""
        self.deadline_s = _later(self.deadline_s, by_s)
        self.bring_up_over_s = _later(self.bring_up_over_s, by_s)
        self.broken_since_s = _later(self.broken_since_s, by_s)
        self.suspect_since_s = _later(self.suspect_since_s, by_s)
        self.overdue_check_s = _later(self.overdue_check_s, by_s)

    def hold(self, by_s: float) -> None:
        """For so long somebody was paused. Whatever tells of a loss goes on as ever."""
        self.deadline_s = _later(self.deadline_s, by_s)
        self.bring_up_over_s = _later(self.bring_up_over_s, by_s)
        self.broken_since_s = _later(self.broken_since_s, by_s)
        self.overdue_check_s = _later(self.overdue_check_s, by_s)
        self.first_proposal_s = _later(self.first_proposal_s, by_s)


def _later(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s
