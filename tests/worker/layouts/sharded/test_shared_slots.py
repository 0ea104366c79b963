"""Gathering and summing in shared memory: results have Gloo's bits, and nothing is overwritten too
soon."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import shared_memory_bodies
from support.processes.worlds import assemble, run_on_gloo

from shoal.layouts.sharded.shared_slots import NUM_GATHERED, NUM_SUMMED, SharedSlots
from shoal_proto.errors import InvalidSpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_and_means_have_the_bits_that_gloo_gives_them(dtype: torch.dtype) -> None:
    """The addends are in a slot in two of three rounds and in other memory in the rest; the 12
    rounds reuse the same slots."""
    for found in run_on_gloo(3, shared_memory_bodies.sums, dtype, 12):
        assert found == [(True, True)] * 12


def test_a_sum_that_is_too_large_for_a_slot_is_left_to_gloo() -> None:
    assert run_on_gloo(2, shared_memory_bodies.too_large) == [False] * 2


def test_only_sums_and_means_are_computed() -> None:
    data = memoryview(bytearray((NUM_GATHERED + NUM_SUMMED) * 4096))
    memory: Any = SimpleNamespace(
        data=data, rank=0, world_size=1, gather_words=lambda message: [message]
    )
    slots, own = SharedSlots(memory, 4096, 4096), torch.empty(2)
    with pytest.raises(InvalidSpec, match="SUM or AVG"):
        slots.reduce_scatter(own, torch.ones(2), dist.ReduceOp.MAX)
    assert slots.reduce_scatter(own, torch.ones(2), dist.ReduceOp.SUM)
    assert own.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("num_kept", [0, 1, 2, 5])
def test_values_that_a_rank_still_uses_are_not_overwritten(num_kept: int) -> None:
    """The next rank to gather must not overwrite values with which another rank computes."""
    for sound in run_on_gloo(3, shared_memory_bodies.gathered_and_kept, num_kept):
        assert all(sound)


def test_gathering_ahead_in_backward_adds_no_barriers() -> None:
    """A step has one barrier for each group of layers in forward, one where backward begins, and
    one for each sum."""
    for num_groups, barriers in run_on_gloo(2, shared_memory_bodies.barriers_of_steps, 3):
        assert num_groups > 2
        assert barriers == [2 * num_groups + 1] * 3


@pytest.mark.long
def test_a_layout_that_is_released_leaves_no_descriptor() -> None:
    """Regression: neither the memory nor its users' connections were closed."""
    for counts in run_on_gloo(3, shared_memory_bodies.descriptors_after, 5):
        assert counts == counts[:1] * 5


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize(
    "options",
    [
        {"min_group_bytes": 150},
        {"min_group_bytes": 150, "free_after_forward": False},
        {"min_group_bytes": 150, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    ],
    ids=["fsdp", "zero2", "bf16"],
)
def test_training_gives_the_same_bits_with_shared_memory_and_without(options: Any) -> None:
    by_memory, by_gloo = (
        assemble(run_on_gloo(3, shared_memory_bodies.trained, transport, options))
        for transport in ("auto", "tcp")
    )
    assert by_memory.keys() == by_gloo.keys()
    assert all(torch.equal(by_memory[name], by_gloo[name]) for name in by_gloo)
