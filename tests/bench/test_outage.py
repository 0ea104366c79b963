"""Losses of training that the bench of outages counts in what workers logged."""

from typing import Any

import pytest


@pytest.fixture
def outage() -> Any:
    import outage  # noqa: PLC0415 - bench/ is on the path of a test only

    return outage


def log_of(outage: Any, first: int, last: int, *, begin_s: float, generation: int = 1) -> list[Any]:
    return [
        outage.Step(begin_s + number / 100, generation, number, 0, 16 * number)
        for number in range(first, last)
    ]


def test_steps_that_a_worker_repeats_or_leaves_out_are_lost(outage: Any) -> None:
    log = log_of(outage, 0, 100, begin_s=10.0)
    assert outage.steps_lost([log], 0.0) == 0
    assert outage.steps_lost([[*log[:50], *log[47:]]], 0.0) == 3
    assert outage.steps_lost([[*log[:50], *log[52:]]], 0.0) == 2


def test_a_worker_that_was_replaced_before_the_outage_is_not_counted(outage: Any) -> None:
    """The replaced worker's log stays, and has no step since the outage began."""
    replaced = log_of(outage, 0, 30, begin_s=10.0)
    logs = [replaced, *([log_of(outage, 30, 90, begin_s=100.0, generation=2)] * 2)]
    assert outage.steps_lost(logs, 100.0) == 0


def test_training_is_awaited_of_the_workers_that_are_there(outage: Any) -> None:
    """Two workers train; a third was replaced, and a fourth has not begun."""
    number = outage.STEPS_TO_START + 1
    old, *both = (log_of(outage, 0, number, begin_s=at_s) for at_s in (10.0, 100.0, 100.0))
    assert outage.all_train([old, *both, []], 99.0)
    assert not outage.all_train([old, both[0], both[1][:5]], 99.0)
