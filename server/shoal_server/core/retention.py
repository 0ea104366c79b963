"""Retention of jobs: when a job without members has failed, and when records are removed."""

from dataclasses import dataclass
from enum import Enum

MAX_GAP_S = 3600.0
"""Longest plausible time without a leader; beyond it, the leaders' clocks are doubted."""
MAX_HELD_S = 6 * 3600.0
"""Longest time for which nothing is removed while a clock is doubted, so that people can check."""


class DueAction(Enum):
    NOTHING = "nothing"
    ABANDON = "no member came back: the job has failed"
    KEEP_RESULT = "the job is over: its result is to be kept in its own record"
    CLEAR = "everything of the job except its own record is removed"
    FORGET = "the job's own record is removed too, and its name is free"


@dataclass(frozen=True, kw_only=True)
class RetentionLimits:
    """Retention times; infinite for never."""

    abandon_after_s: float
    """Time without members after which a job has failed."""
    records_s: float
    """Time after a job's end for which its records are kept. The parameters of a finished job are
    removed at its end."""
    summary_s: float
    """Time after a job's end for which its own record is kept."""


@dataclass(frozen=True, kw_only=True)
class RetentionState:
    """Times, all of one clock, and flags of a job that decide what is due."""

    ended_s: float | None
    """None: the job is not over."""
    empty_since_s: float | None
    """None: the job has members, or the time is not known."""
    has_result: bool
    """True if the job's own record holds the result."""
    is_cleared: bool
    """True if everything but the job's own record is removed."""


def held_s(now_s: float, noted_s: float | None) -> float:
    """Seconds for which a new leader removes nothing; 0 unless more than MAX_GAP_S have passed
    since `noted_s`.

    `noted_s` is the last time that an earlier leader noted by its own clock, if any. A slow clock
    only delays removals.
    """
    gap_s = 0.0 if noted_s is None else now_s - noted_s
    return min(gap_s, MAX_HELD_S) if gap_s > MAX_GAP_S else 0.0


def due_action(job: RetentionState, limits: RetentionLimits, now_s: float) -> DueAction:
    """The first action that is due. Ask again once it is done."""
    if job.ended_s is None:
        empty_s = 0.0 if job.empty_since_s is None else now_s - job.empty_since_s
        return DueAction.ABANDON if empty_s > limits.abandon_after_s else DueAction.NOTHING
    over_s = now_s - job.ended_s
    if over_s > limits.summary_s:
        return DueAction.FORGET
    if not job.has_result:
        return DueAction.KEEP_RESULT
    if over_s > limits.records_s and not job.is_cleared:
        return DueAction.CLEAR
    return DueAction.NOTHING


REMOVES = frozenset({DueAction.CLEAR, DueAction.FORGET})
