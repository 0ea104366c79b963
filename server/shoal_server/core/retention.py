"""What becomes of a job that nobody is in: when it has failed, and when what is kept of it goes."""

from dataclasses import dataclass
from enum import Enum

MAX_GAP_S = 3600.0
"""So long nobody may have led, by the clocks of two leaders, before one of them is doubted."""
MAX_HELD_S = 6 * 3600.0
"""For so long at the most nothing is removed then: for people to look at the clocks."""


class Due(Enum):
    """What is to be done about a job now."""

    NOTHING = "nothing"
    ABANDON = "nobody came back: it has failed"
    KEEP_RESULT = "it is over: what came of it is to be kept in its own record"
    CLEAR = "all but its own record goes"
    FORGET = "its own record goes too, and its name is free"


@dataclass(frozen=True, kw_only=True)
class RetentionLimits:
    """Seconds, each of them; infinite for never."""

    abandon_after_s: float
    """Without members for so long, a job has failed."""
    records_s: float
    """For so long after its end all of a job is kept."""
    summary_s: float
    """For so long after its end its own record is."""


@dataclass(frozen=True, kw_only=True)
class JobAge:
    """What is looked at of a job. Times are those of one clock."""

    ended_s: float | None
    """None: it is not over."""
    empty_since_s: float | None
    """None: it has members."""
    has_result: bool
    """Whether what came of it is kept in its own record."""
    is_cleared: bool
    """Whether all but that record is gone."""


def held_s(now_s: float, noted_s: float | None) -> float:
    """For how long a leader removes nothing, by whose clock it is `now_s`, if the leader before
    noted `noted_s` by its own last. None: nothing was noted. A clock that is behind removes late,
    which does no harm."""
    gap_s = 0.0 if noted_s is None else now_s - noted_s
    return min(gap_s, MAX_HELD_S) if gap_s > MAX_GAP_S else 0.0


def due(job: JobAge, limits: RetentionLimits, now_s: float) -> Due:
    """What is due first. Each is looked for again once it is done, so none waits for another."""
    if job.ended_s is None:
        empty_s = 0.0 if job.empty_since_s is None else now_s - job.empty_since_s
        return Due.ABANDON if empty_s > limits.abandon_after_s else Due.NOTHING
    over_s = now_s - job.ended_s
    if over_s > limits.summary_s:
        return Due.FORGET
    if not job.has_result:
        return Due.KEEP_RESULT
    if over_s > limits.records_s and not job.is_cleared:
        return Due.CLEAR
    return Due.NOTHING


REMOVES = frozenset({Due.CLEAR, Due.FORGET})
"""What cannot be undone."""
