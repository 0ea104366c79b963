"""Times at which a job without members fails, and at which records of an ended job are deleted."""

from math import inf

import pytest

from shoal_server.core.retention import DueAction, RetentionLimits, RetentionState, due_action

LIMITS = RetentionLimits(abandon_after_s=100.0, records_s=1000.0, summary_s=10_000.0)


def over(*, has_result: bool = True, is_cleared: bool = False) -> RetentionState:
    return RetentionState(
        ended_s=0.0, empty_since_s=None, has_result=has_result, is_cleared=is_cleared
    )


def not_over(empty_since_s: float | None) -> RetentionState:
    return RetentionState(
        ended_s=None, empty_since_s=empty_since_s, has_result=False, is_cleared=False
    )


@pytest.mark.parametrize(
    ("job", "now_s", "expected"),
    [
        (not_over(None), 1e6, DueAction.NOTHING),
        (not_over(0.0), 100.0, DueAction.NOTHING),
        (not_over(0.0), 100.1, DueAction.ABANDON),
        (over(has_result=False), 0.0, DueAction.KEEP_RESULT),
        (over(has_result=False), 1001.0, DueAction.KEEP_RESULT),
        (over(), 1000.0, DueAction.NOTHING),
        (over(), 1000.1, DueAction.CLEAR),
        (over(is_cleared=True), 1000.1, DueAction.NOTHING),
        (over(is_cleared=True), 10_000.1, DueAction.FORGET),
        (over(has_result=False), 10_000.1, DueAction.FORGET),
    ],
)
def test_each_action_is_due_at_its_time(
    job: RetentionState, now_s: float, expected: DueAction
) -> None:
    """The result of a job is kept before its records are cleared."""
    assert due_action(job, LIMITS, now_s) is expected


def test_infinite_limits_keep_all_records() -> None:
    forever = RetentionLimits(abandon_after_s=inf, records_s=inf, summary_s=inf)
    assert due_action(not_over(0.0), forever, 1e12) is DueAction.NOTHING
    assert due_action(over(), forever, 1e12) is DueAction.NOTHING
