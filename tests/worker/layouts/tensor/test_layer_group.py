"""Collectives in shared memory of ranks that compute layers together."""

import pytest
import torch
from support.processes import layer_group_bodies as bodies
from support.processes.worlds import assemble, largest_difference, one_process, run_on_gloo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_collectives_in_memory_give_what_gloo_gives(dtype: torch.dtype) -> None:
    """The same slots are used many times; some values are not contiguous in memory."""
    for alike, num_barriers in run_on_gloo(3, bodies.collectives, dtype, 4096, 6):
        assert alike
        assert num_barriers == 6 * 4


def test_values_that_are_too_large_for_a_slot_go_over_gloo() -> None:
    """Ranks decide alike: they have met before, and know each other's sizes."""
    for alike, num_barriers in run_on_gloo(2, bodies.collectives, torch.float32, 32, 3):
        assert alike
        assert num_barriers == 3 * 4


@pytest.mark.sampled()
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "by positions"])
def test_training_in_memory_equals_one_process(sequence: bool) -> None:
    found = run_on_gloo(2, bodies.trained, sequence)
    assert all(num_barriers for _, num_barriers in found)
    ours, theirs = assemble([state for state, _ in found]), one_process(bodies.TRAINING)
    assert largest_difference(ours, {name: theirs[name] for name in ours}) <= 1e-5


def test_ranks_that_must_not_share_memory_train_over_gloo() -> None:
    found = run_on_gloo(2, bodies.trained, False, "tcp")
    assert not any(num_barriers for _, num_barriers in found)
    ours, theirs = assemble([state for state, _ in found]), one_process(bodies.TRAINING)
    assert largest_difference(ours, {name: theirs[name] for name in ours}) <= 1e-5


def test_values_of_different_sizes_are_refused_on_all_ranks() -> None:
    """Gloo terminates a process that receives more than it expects; in memory a rank would add up
    whatever it finds."""
    for refusal in run_on_gloo(2, bodies.different_sizes):
        assert "computed with different layers at the same time" in refusal
        assert "rank 0: a value of 6 elements; rank 1: a value of 5 elements" in refusal


def test_a_cut_ends_a_wait_and_later_collectives_are_refused() -> None:
    waited, left = run_on_gloo(2, bodies.cut_amid_a_collective)
    assert "the test is over" in waited
    assert "its generation had ended" in left
