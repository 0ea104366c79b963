"""Snapshots that a rank keeps, as it shows them."""

import torch

from shoal.state.host_buffers import StepCopies
from shoal.state.shards import StateShard, TensorShard


def travels(name: str) -> bool:
    return True


def test_a_snapshot_is_shown_only_once_all_names_of_its_step_are_known() -> None:
    """A peer lost before it sent its names may have held tensors that no other rank has."""
    own = {"model.a": TensorShard.whole(torch.ones(3))}
    slot = StepCopies()
    slot.begin_own_copy(StateShard(step=1, shards=own), travels)
    assert slot.complete_copies() == []
    slot.record_names(frozenset({"model.a", "optim.b/exp_avg"}))
    (shown,) = slot.complete_copies()
    assert shown.elsewhere == {"model.a", "optim.b/exp_avg"}
    slot.clear()
    slot.begin_own_copy(StateShard(step=2, shards=own), travels)
    assert slot.complete_copies() == []


def test_a_snapshot_that_comes_with_all_names_is_shown_at_once() -> None:
    """A generation begins with such a snapshot."""
    own = {"model.a": TensorShard.whole(torch.ones(3))}
    slot = StepCopies()
    slot.begin_own_copy(StateShard(step=0, shards=own, elsewhere=frozenset({"model.b"})), travels)
    assert [state_shard.step for state_shard in slot.complete_copies()] == [0]
