"""Calls between two steps whose generation is over: confirmed, or made again by the members that
are in the call, with no other member in their way."""

import pytest

from shoal.strategies.synchronous.script_position import (
    NO_EXPONENT,
    CallInterrupted,
    ScriptPosition,
)
from shoal.strategies.synchronous.step_agreement import StepWeights

STEP = 7


def met(*positions: tuple[int, ScriptPosition]) -> list[str]:
    """Let members meet, each as `(step, position)`. Returns how each continues: "again" (with its
    call), "on", or "away"."""
    positions_in_words = [
        position.as_integers(step, has_state=step >= 0) for step, position in positions
    ]
    found = []
    for step, position in positions:
        try:
            position.follow(positions_in_words, step)
        except CallInterrupted:
            found.append("away")
        else:
            found.append("again" if position.in_call else "on")
    return found


def at(num_calls: int, state: str = "") -> ScriptPosition:
    return ScriptPosition(
        num_calls=num_calls, in_call=state == "in", unconfirmed=state == "returned"
    )


def test_a_call_is_made_again_by_all_members_in_it() -> None:
    crew = [at(1, "in"), at(1, "in")]
    assert met((STEP, crew[0]), (STEP, crew[1])) == ["again", "again"]
    assert [each.num_calls for each in crew] == [1, 1]


@pytest.mark.parametrize(
    "other", [(-1, at(0)), (STEP - 1, at(0)), (STEP, at(1, "returned"))], ids=str
)
def test_a_member_that_is_not_in_the_call_takes_no_part(other: tuple[int, ScriptPosition]) -> None:
    """The other member is a joiner, one that did not commit the step, or one that has the result
    already."""
    assert met((STEP, at(1, "in")), other) == ["again", "away"]


def test_a_result_that_one_member_has_confirmed_holds_for_all() -> None:
    crew = [at(2), at(1, "returned"), at(2, "in")]
    assert met(*((STEP, each) for each in crew)) == ["away", "on", "again"]
    assert (crew[1].num_calls, crew[1].unconfirmed) == (2, False)


def test_a_result_that_all_have_is_confirmed_when_they_meet() -> None:
    """Holds for a joiner, and for a member that has just reached the step."""
    crew = [at(1, "returned"), at(1, "returned")]
    joiner, behind = at(0), at(3)
    assert met(*((STEP, each) for each in crew), (-1, joiner), (STEP - 1, behind)) == ["on"] * 4
    assert {each.num_calls for each in (*crew, joiner, behind)} == {2}
    assert not any(each.unconfirmed for each in crew)


def test_a_first_generation_has_nothing_to_settle() -> None:
    assert met((-1, at(0)), (-1, at(0))) == ["on", "on"]


def test_a_committed_step_settles_what_was_before_it() -> None:
    position = at(1, "returned")
    position.stepped()
    assert position.as_integers(STEP, has_state=True) == [STEP, 0, 0, 0, 0, NO_EXPONENT, 0]


def test_a_request_to_stop_reaches_all_members_and_keeps_its_step() -> None:
    """The state may go back for it: then the steps in between are taken again, and no further
    ones."""
    crew = [at(0), at(0), at(0)]
    crew[1].stop(STEP, "enough")
    assert met((STEP, crew[0]), (STEP - 3, crew[1]), (-1, crew[2])) == ["on"] * 3
    assert {each.stop_at for each in crew} == {STEP}


def test_a_request_to_stop_in_a_step_that_did_not_happen_is_dropped() -> None:
    position = at(0)
    position.stop(STEP + 1, "enough")
    position.undo(STEP)
    assert position.as_integers(STEP, has_state=True)[4] == 0


@pytest.mark.parametrize(("weights", "unit"), [([600.0, 500.0], 512.0), ([1e-3, 1e-3], 2**-10)])
def test_the_unit_of_losses_weights_is_kept_over_generations(
    weights: list[float], unit: float
) -> None:
    """Scaled gradients of a generation's first step would overflow if multiplied by the number of
    tokens. Only one survivor had the votes of the last step; a newcomer knows no unit."""
    survivors, newcomer = (at(0), at(0)), at(0)
    assert StepWeights(newcomer).unit == 1
    StepWeights(survivors[1]).factor(weights)
    met((STEP, survivors[0]), (STEP, survivors[1]), (-1, newcomer))
    assert [StepWeights(each).unit for each in (*survivors, newcomer)] == [unit] * 3
