"""Reports of a member on the time during which it did not train."""

import pytest

from shoal.session.step_reports import TrainingPauses


def test_a_pause_is_what_comes_on_top_of_a_usual_step() -> None:
    """A pause is measured from the last commit of one generation to the first of the next; here a
    step takes a second."""
    pauses = TrainingPauses()
    for step in range(1, 6):
        assert pauses.committed(1, step, float(step)) is None
    pause = pauses.committed(2, 6, 6.06)
    assert pause is not None
    assert (pause.generation, pause.lost_steps) == (2, 0)
    assert pause.paused_s == pytest.approx(0.06)
    assert str(pause) == "paused 0.06 s; 0 steps lost"
    assert pauses.committed(2, 7, 7.06) is None


def test_steps_that_are_taken_again_are_lost() -> None:
    """The next committed step after a return to the checkpoint of step 90, for example, is the
    91st."""
    pauses = TrainingPauses()
    pauses.committed(1, 100, 1.0)
    pause = pauses.committed(2, 91, 2.0)
    assert pause is not None and pause.lost_steps == 10


def test_a_newcomer_has_paused_for_nothing() -> None:
    assert TrainingPauses().committed(7, 500, 1.0) is None


def test_an_agreed_change_that_takes_no_time_is_no_pause() -> None:
    pauses = TrainingPauses()
    for step in (1, 2, 3):
        pauses.committed(1, step, step * 0.5)
    pause = pauses.committed(2, 4, 1.9)
    assert pause is not None and pause.paused_s == 0.0
