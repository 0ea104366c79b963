"""Reports of a member on the time during which it did not train."""

import pytest

from shoal.session.step_reports import InterruptionMeter


def test_an_interruption_is_the_time_beyond_a_usual_step() -> None:
    """An interruption is measured from the last commit of one generation to the first of the next;
    here a step takes a second."""
    meter = InterruptionMeter()
    for step in range(1, 6):
        assert meter.note_commit(1, step, float(step)) is None
    interruption = meter.note_commit(2, 6, 6.06)
    assert interruption is not None
    assert (interruption.generation, interruption.lost_steps) == (2, 0)
    assert interruption.paused_s == pytest.approx(0.06)
    assert str(interruption) == "paused 0.06 s; 0 steps lost"
    assert meter.note_commit(2, 7, 7.06) is None


def test_steps_that_are_taken_again_are_lost() -> None:
    """The next committed step after a return to the checkpoint of step 90, for example, is the
    91st."""
    meter = InterruptionMeter()
    meter.note_commit(1, 100, 1.0)
    interruption = meter.note_commit(2, 91, 2.0)
    assert interruption is not None and interruption.lost_steps == 10


def test_a_newcomer_was_not_interrupted() -> None:
    assert InterruptionMeter().note_commit(7, 500, 1.0) is None


def test_an_agreed_change_that_takes_no_time_interrupts_for_zero_seconds() -> None:
    meter = InterruptionMeter()
    for step in (1, 2, 3):
        meter.note_commit(1, step, step * 0.5)
    interruption = meter.note_commit(2, 4, 1.9)
    assert interruption is not None and interruption.paused_s == 0.0
