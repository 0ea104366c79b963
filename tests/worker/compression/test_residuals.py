"""State of a compression that outlives a step, and state that is discarded with a step that did not
happen."""

import torch

from shoal.compression.base import PackedTensors
from shoal.compression.residuals import Residuals, StepValues


def test_values_of_a_step_that_is_computed_again_are_forgotten() -> None:
    carry: StepValues[int] = StepValues()
    carry.begin(4)
    carry.put("a", 1)
    carry.begin(5)
    carry.put("a", 2)
    carry.put("b", 3)
    assert (carry.get("a"), carry.get("b")) == (2, 3)
    carry.begin(5)
    assert (carry.get("a"), carry.get("b")) == (1, None)


def test_values_of_a_failed_step_count_if_other_members_committed_it() -> None:
    """The member takes over the others' state and begins with the next step."""
    carry: StepValues[int] = StepValues()
    carry.begin(4)
    carry.put("a", 1)
    carry.begin(5)
    assert carry.get("a") == 1


def test_a_value_removed_in_a_failed_step_is_restored() -> None:
    carry: StepValues[int] = StepValues()
    carry.begin(0)
    carry.put("a", 1)
    carry.begin(1)
    carry.put("a", None)
    assert carry.get("a") is None
    carry.begin(1)
    assert carry.get("a") == 1


def test_going_back_to_an_older_step_forgets_the_newer() -> None:
    carry: StepValues[int] = StepValues()
    carry.begin(9)
    carry.put("a", 1)
    carry.begin(3)
    assert carry.get("a") is None


def test_residuals_follow_their_parameters_into_another_order() -> None:
    residuals = Residuals()
    sizes = {"a": torch.Size([2]), "b": torch.Size([3])}
    first = PackedTensors(torch.zeros(5), ["a", "b"], [sizes["a"], sizes["b"]])
    residuals.begin(0)
    residuals.keep(first, torch.arange(5.0))
    residuals.begin(1)
    other = PackedTensors(torch.full((5,), 10.0), ["b", "a"], [sizes["b"], sizes["a"]])
    assert residuals.compensate(other, 7).tolist() == [12, 13, 14, 10, 11, 0, 0]
    residuals.release(other)
    assert other.flat.tolist() == [12, 13, 14, 10, 11]
    assert residuals.compensate(other).tolist() == [12, 13, 14, 10, 11]
