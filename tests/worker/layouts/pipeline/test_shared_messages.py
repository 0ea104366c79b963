"""Stages on one machine send each other activations and gradients through shared memory."""

from functools import partial
from pathlib import Path

import pytest
import torch
from support.collectives import pipeline_message_bodies as bodies
from support.processes.ranks import Ranks
from support.processes.worlds import run_on_gloo

from shoal.layouts.pipeline import shared_messages

SIZES = (8, 8, 8, 8, 6, 6, 8, 24, 24, 8)
"""Batch sizes. 24 needs more memory than was reserved."""


@pytest.mark.sampled()
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_gradients_are_those_of_messages_over_the_group(schedule: str) -> None:
    """Gradients are equal to the last bit, in batches of changing size; nothing is sent over the
    group meanwhile."""
    over_group = run_on_gloo(3, partial(bodies.passes, SIZES, schedule, shares=False))
    in_memory = run_on_gloo(3, partial(bodies.passes, SIZES, schedule, shares=True))
    for rank, (theirs, ours) in enumerate(zip(over_group, in_memory, strict=True)):
        for (_, their_loss, their_gradients), (_, loss, gradients) in zip(
            theirs, ours, strict=True
        ):
            assert float(their_loss) == float(loss)
            assert gradients.keys() == their_gradients.keys()
            for name, gradient in gradients.items():
                assert gradient is not None
                assert torch.equal(gradient, their_gradients[name]), f"rank {rank}: {name}"
        sent = [count for count, _, _ in ours]
        described = 2 if rank < 2 else 0
        assert sent[2:4] == [0, 0]
        assert sent[4:7] == [described, 0, 0]
        assert sent[9] == 0
        # Too little memory: over the group, once shapes are described, as in the first passes.
        assert sent[8] == theirs[8][0] > 0
        assert sent[0] == theirs[0][0] > 0


@pytest.mark.parametrize("how", ["kill", "cut", "raise"])
def test_stages_that_wait_for_a_message_learn_at_once_of_a_lost_stage(
    tmp_path: Path, how: str
) -> None:
    """The limit is far away. With `cut` no stage fails: the last one waits, the first cuts its
    layout."""
    with Ranks() as ranks:
        body, path = bodies.run_passes_until_a_fault, str(tmp_path / "store")
        stages = [ranks.start(body, path, rank, 3, how) for rank in range(3)]
        for stage in stages[:2]:
            assert "ranks no longer share memory" in stage.expect("failed")["text"]
        if how == "raise":
            assert "the user's own" in stages[2].expect("failed")["text"]


def test_a_message_of_another_size_and_one_too_many_are_refused() -> None:
    too_many, other = run_on_gloo(2, bodies.refused)
    assert "sends more than its shared memory holds" in too_many
    assert "12 bytes" in other
    assert "16 bytes" in other


def test_messages_beyond_the_limit_of_shared_memory_get_none() -> None:
    most = shared_messages.MAX_BYTES // 2
    assert shared_messages.lanes_bytes([most, 0]) > shared_messages.MAX_BYTES
    assert shared_messages.lanes_bytes([most, 64, 0]) == 0
