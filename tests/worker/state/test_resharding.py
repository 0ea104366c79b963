"""Resharding over real groups: ranks get what they need, from any cut to any other."""

import pytest
from support.collectives import state_bodies
from support.processes.worlds import run_on_gloo

CHANGES = [
    (("rows", 3), ("rows", 2)),
    (("rows", 2), ("rows", 3)),
    (("rows", 4), ("rows", 3)),
    (("rows", 4), ("rows", 4)),
    (("rows", 3), ("columns", 3)),
    (("columns", 4), ("rows", 2)),
    (("whole", 2), ("rows", 4)),
    (("whole", 4), ("whole", 4)),
    (("whole", 1), ("whole", 3)),
    (("rows", 3), ("whole", 4)),
]


@pytest.mark.parametrize("shared_bytes", [0, 4096])
def test_a_state_is_transferred_from_any_cut_to_any_other(shared_bytes: int) -> None:
    """State is equal bit for bit in every dtype, with indivisible sizes, and with a bucket for each
    part. It arrives in memory of its own or in borrowed memory; held state stays unchanged. Through
    shared memory it goes in many rounds, as slots are smaller than most tensors."""
    for differences in run_on_gloo(4, state_bodies.reshard_all, CHANGES, shared_bytes):
        assert differences == {}


@pytest.mark.parametrize("shared_bytes", [0, 1 << 20])
def test_a_large_tensor_is_transferred_in_many_messages(shared_bytes: int) -> None:
    """Rows are sent from their place in memory; columns are packed."""
    assert run_on_gloo(3, state_bodies.reshard_large, shared_bytes) == [True] * 3


def test_few_collectives_are_made_if_nothing_must_be_sent() -> None:
    """Ranks make one collective if each has everything, two if each has its part."""
    for calls in run_on_gloo(3, state_bodies.count_calls):
        assert calls == {
            "each has all": {"all_gather": 1},
            "each has its part": {"all_gather": 2},
            "a long list": {"all_gather": 2},
        }


def test_ranks_refuse_alike_and_go_on_together() -> None:
    """Errors are raised on all ranks, and the group is usable afterwards."""
    for errors in run_on_gloo(2, state_bodies.refused):
        assert errors == {
            "lost": "StateLost",
            "nobody": "StateLost",
            "shapes": "ShapeMismatch",
            "dtypes": "DtypeMismatch",
            "garbage": "MalformedMessage",
            "boundless": "MalformedMessage",
            "last": "7",
        }
